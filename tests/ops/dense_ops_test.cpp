// The ops without a KV cache, on every device, against plain loops in double.
#include <cmath>

#include "backends/cpu/kernels.h"
#include "tests/ops/op_test.h"

namespace thimble::test {
namespace {

constexpr DType kTypes[] = {DType::kF32,  DType::kF16,  DType::kBF16, DType::kQ8_0,
                            DType::kQ4_0, DType::kQ4_1, DType::kQ5_0, DType::kQ5_1,
                            DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};

// A random matrix as its bytes in a file and as floats, which dequant_test checks.
struct Matrix {
  std::vector<std::byte> bytes;
  std::vector<float> values;
};

Matrix random_matrix(Random& random, DType type, uint32_t rows, uint32_t cols) {
  const DTypeInfo& info = dtype_info(type);
  const size_t n = size_t(rows) * cols;
  Matrix m{std::vector<std::byte>(dtype_bytes(type, n)), std::vector<float>(n)};
  for (std::byte& b : m.bytes) b = static_cast<std::byte>(random.below(256));
  for (size_t block = 0; block < m.bytes.size(); block += info.block_bytes) {
    std::byte* at = &m.bytes[block];
    const auto put_half = [&](size_t offset) {
      const uint16_t h = f32_to_f16(random.uniform(-0.02f, 0.02f));
      std::memcpy(at + offset, &h, sizeof h);
    };
    switch (type) {
      case DType::kF32: {
        const float f = random.uniform(-1, 1);
        std::memcpy(at, &f, sizeof f);
        break;
      }
      case DType::kBF16: {
        const float f = random.uniform(-1, 1);
        std::memcpy(at, reinterpret_cast<const std::byte*>(&f) + 2, 2);
        break;
      }
      case DType::kF16:
      case DType::kQ8_0:
      case DType::kQ4_0:
      case DType::kQ5_0:
        put_half(0);
        break;
      case DType::kQ4_1:
      case DType::kQ5_1:
      case DType::kQ4_K:
      case DType::kQ5_K:
        put_half(0);
        put_half(2);
        break;
      case DType::kQ6_K:
        put_half(208);
        break;
    }
  }
  for (uint32_t r = 0; r < rows; ++r)
    cpu::kernels().dequantize(type, m.bytes.data() + dtype_bytes(type, uint64_t(r) * cols), cols,
                              &m.values[size_t(r) * cols]);
  return m;
}

struct Product {
  double sum, tolerance;
};
// Row c of W times row r of x. n products and n additions in f32 are each off by at most half an ulp of the
// sum of magnitudes; three more operations may follow (bias, add, K blocks are among the n).
Product product(const Matrix& w, uint32_t c, const float* x, uint32_t n, double bias, double before) {
  double sum = bias + before, magnitude = std::fabs(bias) + std::fabs(before);
  for (uint32_t i = 0; i < n; ++i) {
    const double p = double{w.values[size_t(c) * n + i]} * double{x[i]};
    sum += p;
    magnitude += std::fabs(p);
  }
  return {sum, (2 * n + 3) * 0x1p-24 * magnitude};
}

// Rows of x with `stride` elements each, poison between and behind them.
std::vector<float> strided(const std::vector<float>& x, uint32_t rows, uint32_t cols, uint32_t stride,
                           uint32_t max_rows) {
  std::vector<float> all = padded_rows(std::vector<float>(), size_t(max_rows) * stride);
  for (uint32_t r = 0; r < rows; ++r) std::copy_n(&x[size_t(r) * cols], cols, &all[size_t(r) * stride]);
  return all;
}

class DenseOps : public OpTest {
 protected:
  void check_linear(Random& random, DType type, uint32_t rows, uint32_t n, uint32_t cols, bool bias,
                    bool add) {
    SCOPED_TRACE(::testing::Message() << dtype_info(type).name << ": " << rows << " rows, W [" << cols << "]["
                                      << n << "]" << (bias ? ", bias" : "") << (add ? ", add" : ""));
    clear();
    const uint32_t max_rows = rows + 3, x_stride = n + 5, y_stride = cols + 3;
    const Matrix w = random_matrix(random, type, cols, n);
    const std::vector<float> x = random.floats(size_t(rows) * n), b = random.floats(cols);
    const std::vector<float> before = random.floats(size_t(rows) * cols);
    const View y = add ? inout(strided(before, rows, cols, y_stride, max_rows))
                       : output<float>(size_t(max_rows) * y_stride);
    const Linear op{input(strided(x, rows, n, x_stride, max_rows)),
                    weight(type, cols, n, w.bytes),
                    bias ? input(b) : View(),
                    y,
                    {.in_cols = n,
                     .out_cols = cols,
                     .x_stride = x_stride,
                     .y_stride = y_stride,
                     .add = add,
                     .rows = kStepRows}};
    run({.n_rows = rows}, max_rows, [&](Recorder& r) { r.linear(op); });
    const std::vector<float> got = get<float>(y);
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t c = 0; c < cols; ++c) {
        const Product p = product(w, c, &x[size_t(r) * n], n, bias ? double{b[c]} : 0,
                                  add ? double{before[size_t(r) * cols + c]} : 0);
        ASSERT_NEAR(got[size_t(r) * y_stride + c], p.sum, p.tolerance) << "at " << r << ", " << c;
      }
      ASSERT_TRUE(is_poison(got, size_t(r) * y_stride + cols, y_stride - cols)) << "wrote behind row " << r;
    }
    if (GetParam() == "cpu") {  // others may compute rows beyond n_rows; nobody reads them
      ASSERT_TRUE(is_poison(got, size_t(rows) * y_stride, size_t(max_rows - rows) * y_stride));
    }
  }
};
THIMBLE_OP_TESTS(DenseOps);

TEST_P(DenseOps, LinearMultipliesEveryTypeAndShape) {
  Random random;
  uint32_t variant = 0;
  for (DType type : kTypes) {
    const uint32_t block = dtype_info(type).block;
    const std::vector<uint32_t> depths = block == 1    ? std::vector<uint32_t>{1, 31, 33, 1000}
                                         : block == 32 ? std::vector<uint32_t>{32, 96, 544}
                                                       : std::vector<uint32_t>{256, 768};
    for (uint32_t n : depths)
      for (uint32_t cols : {1u, 31u, 33u, 130u})
        for (uint32_t rows : {1u, 2u, 4u, 5u, 13u}) {
          check_linear(random, type, rows, n, cols, variant & 1, variant & 2);
          if (HasFatalFailure()) return;
          variant += 1 + variant % 3;
        }
  }
}

TEST_P(DenseOps, LinearMultipliesManyRowsAndLongOnes) {
  Random random;
  check_linear(random, DType::kQ8_0, 1000, 32, 33, true, false);
  check_linear(random, DType::kF32, 1030, 31, 70, false, true);
  check_linear(random, DType::kQ4_K, 130, 2816, 65, true, true);
}

TEST_P(DenseOps, LinearOfLogitsUsesTheirRows) {
  Random random;
  const Matrix w = random_matrix(random, DType::kQ8_0, 40, 64);
  const std::vector<float> x = random.floats(2 * 64);
  const View y = output<float>(9 * 40);
  const Linear op{
      input(padded_rows(x, 9 * 64)),
      weight(DType::kQ8_0, 40, 64, w.bytes),
      View(),
      y,
      {.in_cols = 64, .out_cols = 40, .x_stride = 64, .y_stride = 40, .add = 0, .rows = kLogitRows}};
  run({.n_rows = 9, .n_logit_rows = 2}, 9, [&](Recorder& r) { r.linear(op); });
  const std::vector<float> got = get<float>(y);
  for (uint32_t i = 0; i < 80; ++i) {
    const Product p = product(w, i % 40, &x[size_t(i / 40) * 64], 64, 0, 0);
    ASSERT_NEAR(got[i], p.sum, p.tolerance);
  }
  if (GetParam() == "cpu") {
    EXPECT_TRUE(is_poison(got, 80, 7 * 40));
  }
}

TEST_P(DenseOps, GluMultipliesTheActivatedGate) {
  Random random;
  for (DType type : {DType::kQ8_0, DType::kQ4_K, DType::kF16})
    for (uint32_t act : {kActSilu, kActGelu})
      for (uint32_t rows : {1u, 3u, 37u})
        for (uint32_t cols : {1u, 33u, 300u}) {
          SCOPED_TRACE(::testing::Message() << dtype_info(type).name << ", act " << act << ", " << rows
                                            << " rows, " << cols << " columns");
          clear();
          const uint32_t n = 256, max_rows = rows + 2;
          const Matrix gate = random_matrix(random, type, cols, n), up = random_matrix(random, type, cols, n);
          const std::vector<float> x = random.floats(size_t(rows) * n);
          const View h = output<float>(size_t(max_rows) * cols);
          const Glu op{input(padded_rows(x, size_t(max_rows) * n)),
                       weight(type, cols, n, gate.bytes),
                       weight(type, cols, n, up.bytes),
                       h,
                       {.in_cols = n, .out_cols = cols, .act = act}};
          run({.n_rows = rows}, max_rows, [&](Recorder& r) { r.glu(op); });
          const std::vector<float> got = get<float>(h);
          for (uint32_t r = 0; r < rows; ++r)
            for (uint32_t c = 0; c < cols; ++c) {
              const Product g = product(gate, c, &x[size_t(r) * n], n, 0, 0),
                            u = product(up, c, &x[size_t(r) * n], n, 0, 0);
              const double inner =
                  act == kActSilu ? g.sum : 1.5957691216 * (g.sum + 0.044715 * g.sum * g.sum * g.sum);
              const double activated = g.sum / (1 + std::exp(-inner));
              // Slopes: silu' and gelu' stay below 1.13; then the activation's own error (kernels_test) and
              // the product's.
              const double tolerance = 1.13 * g.tolerance * (std::fabs(u.sum) + u.tolerance) +
                                       std::fabs(activated) * u.tolerance +
                                       std::fabs(activated * u.sum) * (8 + 4 * std::fabs(inner)) * 0x1p-24;
              ASSERT_NEAR(got[size_t(r) * cols + c], activated * u.sum, tolerance) << "at " << r << ", " << c;
            }
          if (GetParam() == "cpu") {
            ASSERT_TRUE(is_poison(got, size_t(rows) * cols, size_t(max_rows - rows) * cols));
          }
        }
}

// Same bits, however many threads share the work.
TEST_P(DenseOps, ResultsDoNotDependOnThreads) {
  if (GetParam() != "cpu") GTEST_SKIP() << "threads are the cpu's";
  for (uint32_t rows : {1u, 4u, 5u, 300u}) {
    std::vector<std::vector<float>> results;
    for (uint32_t threads : {1u, 2u, 3u, 16u}) {
      open({.threads = threads});
      Random random;
      const Matrix a = random_matrix(random, DType::kQ8_0, 200, 640),
                   b = random_matrix(random, DType::kQ8_0, 200, 640);
      const View x = input(random.floats(size_t(rows) * 640)), y = output<float>(size_t(rows) * 200),
                 h = output<float>(size_t(rows) * 200);
      const Weight wa = weight(DType::kQ8_0, 200, 640, a.bytes), wb = weight(DType::kQ8_0, 200, 640, b.bytes);
      run({.n_rows = rows}, rows, [&](Recorder& r) {
        r.linear({x,
                  wa,
                  View(),
                  y,
                  {.in_cols = 640,
                   .out_cols = 200,
                   .x_stride = 640,
                   .y_stride = 200,
                   .add = 0,
                   .rows = kStepRows}});
        r.glu({x, wa, wb, h, {.in_cols = 640, .out_cols = 200, .act = kActSilu}});
      });
      std::vector<float> both = get<float>(y);
      const std::vector<float> second = get<float>(h);
      both.insert(both.end(), second.begin(), second.end());
      results.push_back(both);
    }
    for (size_t i = 1; i < results.size(); ++i) EXPECT_EQ(results[i], results[0]) << rows << " rows";
  }
}

TEST_P(DenseOps, RmsNormScalesGroupsOfStridedRows) {
  Random random;
  for (uint32_t cols : {1u, 31u, 33u, 64u, 1000u})
    for (uint32_t groups : {1u, 3u})
      for (bool in_place : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << cols << " columns, " << groups << " groups" << (in_place ? ", in place" : ""));
        clear();
        const uint32_t rows = 5, max_rows = 8, stride = groups * cols + 4;
        const std::vector<float> x = random.floats(size_t(rows) * groups * cols, -1e5f, 1e5f),
                                 w = random.floats(cols);
        const std::vector<float> placed = strided(x, rows, groups * cols, stride, max_rows);
        const View from = in_place ? inout(placed) : input(placed);
        const View y = in_place ? from : output<float>(placed.size());
        const RmsNorm op{
            from,
            input(w),
            y,
            {.cols = cols, .groups = groups, .row_stride = stride, .eps = 1e-6f, .rows = kStepRows}};
        run({.n_rows = rows}, max_rows, [&](Recorder& r) { r.rms_norm(op); });
        const std::vector<float> got = get<float>(y);
        for (uint32_t v = 0; v < rows * groups; ++v) {
          double squares = 0;
          for (uint32_t i = 0; i < cols; ++i)
            squares += double{x[size_t(v) * cols + i]} * double{x[size_t(v) * cols + i]};
          const double scale = 1 / std::sqrt(squares / cols + 1e-6);
          for (uint32_t i = 0; i < cols; ++i) {
            const double exact = double{x[size_t(v) * cols + i]} * scale * double{w[i]};
            // The sum of squares is off by at most `cols` half ulps, halved by the root; six more operations
            // follow.
            ASSERT_NEAR(got[size_t(v / groups) * stride + (v % groups) * cols + i], exact,
                        std::fabs(exact) * (cols / 2.0 + 7) * 0x1p-24);
          }
        }
        for (uint32_t r = 0; r < rows; ++r)
          ASSERT_TRUE(is_poison(got, size_t(r) * stride + groups * cols, 4));
        if (GetParam() == "cpu") {
          ASSERT_TRUE(is_poison(got, size_t(rows) * stride, size_t(max_rows - rows) * stride));
        }
      }
}

TEST_P(DenseOps, ActivationLeavesOtherRowsAlone) {
  Random random;
  for (uint32_t cols : {1u, 31u, 33u, 1000u}) {
    clear();
    const std::vector<float> x = random.floats(size_t(7) * cols, -8, 8);
    const View v = inout(padded_rows(x, size_t(9) * cols));
    run({.n_rows = 7}, 9, [&](Recorder& r) { r.activation({v, {.cols = cols, .act = kActSilu}}); });
    const std::vector<float> got = get<float>(v);
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = double{x[i]} / (1 + std::exp(-double{x[i]}));
      ASSERT_NEAR(got[i], exact, std::fabs(exact) * 6 * 0x1p-24);  // as in kernels_test
    }
    if (GetParam() == "cpu") {
      EXPECT_TRUE(is_poison(got, x.size(), 2 * cols));
    }
  }
}

TEST_P(DenseOps, EmbedTakesRowsOfTheTable) {
  Random random;
  for (DType type : kTypes) {
    SCOPED_TRACE(dtype_info(type).name);
    clear();
    const uint32_t cols = 256, vocab = 50;
    const Matrix table = random_matrix(random, type, vocab, cols);
    const std::vector<int32_t> tokens = {49, 0, 7, 7, 31};
    const View x = output<float>(8 * cols);
    const Embed op{input(padded_rows(tokens, 8)), weight(type, vocab, cols, table.bytes), x, {.cols = cols}};
    run({.n_rows = 5}, 8, [&](Recorder& r) { r.embed(op); });
    const std::vector<float> got = get<float>(x);
    for (size_t r = 0; r < tokens.size(); ++r)
      for (uint32_t i = 0; i < cols; ++i)
        ASSERT_EQ(got[r * cols + i], table.values[size_t(tokens[r]) * cols + i]);
    if (GetParam() == "cpu") {
      ASSERT_TRUE(is_poison(got, 5 * cols, 3 * cols));
    }
  }
}

TEST_P(DenseOps, ArgMaxGivesTiesToTheLowerIdAndIgnoresNan) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {1,     3,    2,    3,    0,   // tie: 1
                                kNan,  -5,   kNan, -4,   -6,  // 3
                                -0.0f, 0,    0,    -1,   -1,  // -0 ties with 0: 0
                                kNan,  kNan, kNan, kNan, kNan, -kInf, -kInf, -3e38f,
                                -kInf, kNan, -1,   2,    kInf, kInf,  9};
  const View index = output<int32_t>(8);
  const View in = input(padded_rows(x, 8 * 5));
  run({.n_rows = 8, .n_logit_rows = 6}, 8, [&](Recorder& r) { r.arg_max({in, index, {.cols = 5}}); });
  std::vector<int32_t> got = get<int32_t>(index);
  got.resize(6);
  EXPECT_EQ(got, (std::vector<int32_t>{1, 3, 0, 0, 2, 2}));
}

TEST_P(DenseOps, LogProbIsStable) {
  Random random;
  for (uint32_t cols : {1u, 31u, 33u, 8192u}) {
    clear();
    const uint32_t rows = 4;
    std::vector<float> x = random.floats(size_t(rows) * cols, -10, 10);
    for (uint32_t i = 0; i < cols; ++i) x[cols + i] *= 1000;  // exp overflows without the shift
    const std::vector<int32_t> target = {0, static_cast<int32_t>(cols) - 1, static_cast<int32_t>(cols / 2),
                                         static_cast<int32_t>(cols / 3)};
    const View y = output<float>(6), in = input(padded_rows(x, size_t(6) * cols)),
               at = input(padded_rows(target, 6));
    run({.n_rows = 6, .n_logit_rows = rows}, 6, [&](Recorder& r) {
      r.log_prob({in, at, y, {.cols = cols}});
    });
    const std::vector<float> got = get<float>(y);
    for (uint32_t r = 0; r < rows; ++r) {
      const float* row = &x[size_t(r) * cols];
      double largest = double{row[0]}, sum = 0;
      for (uint32_t i = 0; i < cols; ++i) largest = std::max(largest, double{row[i]});
      for (uint32_t i = 0; i < cols; ++i) sum += std::exp(double{row[i]} - largest);
      const double exact = double{row[target[r]]} - largest - std::log(sum);
      // Each exp is off by 2 ulp and, through the rounded difference, by |x - max| half ulps; up to 64 floats
      // are added before they become a double; log turns relative into absolute. Terms with |x - max| > 20
      // add nothing that counts.
      ASSERT_NEAR(got[r], exact, (4 + 20 + 64) * 0x1p-24 + std::fabs(exact) * 0x1p-24)
          << "row " << r << " of " << cols;
    }
  }
}

TEST_P(DenseOps, CopyFollowsTheStepsRows) {
  Random random;
  const std::vector<float> x = random.floats(10 * 7);
  const View src = input(x), dst = output<float>(12 * 9);
  run({.n_rows = 10, .first_logit_row = 6, .n_logit_rows = 3, .ring_row = 5}, 10, [&](Recorder& r) {
    r.copy({src,
            dst,
            {.cols = 5,
             .src_stride = 7,
             .dst_stride = 9,
             .from_logit_row = 1,
             .to_ring_row = 1,
             .rows = kLogitRows}});
  });
  std::vector<float> expected = padded_rows(std::vector<float>(), 12 * 9);
  for (uint32_t r = 0; r < 3; ++r) std::copy_n(&x[(6 + r) * 7], 5, &expected[(5 + r) * 9]);
  const std::vector<float> got = get<float>(dst);
  EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0);

  const View all = output<float>(10 * 7);
  run({.n_rows = 10, .first_logit_row = 6, .n_logit_rows = 3, .ring_row = 5}, 10, [&](Recorder& r) {
    r.copy({src,
            all,
            {.cols = 7,
             .src_stride = 7,
             .dst_stride = 7,
             .from_logit_row = 0,
             .to_ring_row = 0,
             .rows = kStepRows}});
  });
  EXPECT_EQ(get<float>(all), x);
}

}  // namespace
}  // namespace thimble::test
