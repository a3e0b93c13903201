// head_linear on every device, against products in double.
#include "tests/ops/op_test.h"
#include "tests/ops/random_matrix.h"

namespace thimble::test {
namespace {

class HeadLinears : public OpTest {
 protected:
  struct Case {
    DType type;
    uint32_t rows, heads, in, out, copied = 0;
    bool transposed = false;
    uint32_t w_slack = 0;  // rows of W before, between and after the heads' matrices
    float scale = 1;
    uint32_t max_rows = 0;  // 0: two more than rows
  };

  void check(Random& random, const Case& c) {
    SCOPED_TRACE(::testing::Message()
                 << dtype_info(c.type).name << ": " << c.rows << " rows, " << c.heads << " heads of ["
                 << c.out << "][" << c.in << "]" << (c.transposed ? " transposed" : "") << ", copied "
                 << c.copied << ", w_slack " << c.w_slack << ", scale " << c.scale);
    clear();
    const uint32_t max_rows = c.max_rows ? c.max_rows : c.rows + 2, its_rows = c.transposed ? c.in : c.out,
                   cols = c.transposed ? c.out : c.in, head_rows = its_rows + c.w_slack;
    // Between the heads of x and of y are numbers that belong to someone else.
    const HeadLinearParams p{.heads = c.heads,
                             .in_cols = c.in,
                             .out_cols = c.out,
                             .copied = c.copied,
                             .x_stride = c.heads * (c.in + c.copied + 4) + 8,
                             .x_head_stride = c.in + c.copied + 4,
                             .y_stride = c.heads * (c.copied + c.out + 4) + 12,
                             .y_head_stride = c.copied + c.out + 4,
                             .w_first = c.w_slack,
                             .w_head_rows = head_rows,
                             .transposed = c.transposed};
    const uint32_t w_rows = c.w_slack + c.heads * head_rows;
    const Matrix w = random_matrix(random, c.type, w_rows, cols);
    // The same with an output in each row, as product() takes it.
    Matrix plain{{}, std::vector<float>(size_t(c.heads) * c.out * c.in)};
    for (uint32_t head = 0; head < c.heads; ++head)
      for (uint32_t o = 0; o < c.out; ++o)
        for (uint32_t i = 0; i < c.in; ++i) {
          const size_t row = c.w_slack + size_t(head) * head_rows + (c.transposed ? i : o);
          plain.values[(size_t(head) * c.out + o) * c.in + i] = w.values[row * cols + (c.transposed ? o : i)];
        }
    const std::vector<float> x = random.floats(size_t(c.rows) * p.x_stride, -1, 1);
    Weight matrix = weight(c.type, w_rows, cols, w.bytes);
    matrix.scale = c.scale;
    const HeadLinear op{input(padded_rows(x, size_t(max_rows) * p.x_stride)), matrix,
                        output<float>(size_t(max_rows) * p.y_stride), p};
    run({.n_rows = c.rows}, max_rows, [&](Recorder& r) { r.record(op); });
    const std::vector<float> got = get<float>(op.y);
    const uint32_t written = c.copied + c.out;
    for (uint32_t row = 0; row < c.rows; ++row) {
      for (uint32_t head = 0; head < c.heads; ++head) {
        const float* from = &x[size_t(row) * p.x_stride + head * p.x_head_stride];
        const size_t to = size_t(row) * p.y_stride + head * p.y_head_stride;
        for (uint32_t i = 0; i < c.copied; ++i) ASSERT_EQ(got[to + i], from[c.in + i]) << "copied " << i;
        for (uint32_t o = 0; o < c.out; ++o) {
          const Product want = product(plain, head * c.out + o, from, c.in, 0, 0,
                                       rounds_heads(max_rows, c.transposed), double{c.scale});
          ASSERT_NEAR(got[to + c.copied + o], want.sum, want.tolerance)
              << "row " << row << ", head " << head << ", output " << o;
        }
        ASSERT_TRUE(is_poison(got, to + written, p.y_head_stride - written)) << "wrote after head " << head;
      }
      const size_t end = size_t(row) * p.y_stride + c.heads * p.y_head_stride;
      ASSERT_TRUE(is_poison(got, end, p.y_stride - c.heads * p.y_head_stride)) << "wrote after row " << row;
    }
    ASSERT_TRUE(is_poison(got, size_t(c.rows) * p.y_stride, size_t(max_rows - c.rows) * p.y_stride));
  }
};
THIMBLE_OP_TESTS(HeadLinears);

TEST_P(HeadLinears, MultiplyEachHeadByItsMatrix) {
  Random random;
  for (const DType type :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0, DType::kQ4_0, DType::kQ4_K, DType::kQ6_K})
    for (const bool transposed : {false, true}) {
      if (is_variation() && type != DType::kQ8_0) continue;
      const uint32_t block = std::max(dtype_info(type).block, 32u);
      for (const uint32_t rows : fewer({1, 4, 5, 33}, {1, 5})) {
        check(random, {.type = type,
                       .rows = rows,
                       .heads = 3,
                       .in = block,
                       .out = 2 * block,
                       .copied = 16,
                       .transposed = transposed,
                       .w_slack = rows == 5 ? 7u : 0});
        if (HasFatalFailure()) return;
      }
    }
}

// Widths around those of tiles and panels.
TEST_P(HeadLinears, TakeAnyWidth) {
  Random random;
  for (const uint32_t in : {1u, 31u, 65u})
    for (const uint32_t out : {1u, 31u, 33u, 130u})
      for (const bool transposed : {false, true}) {
        if (is_slow() && in == 31 && out != 33) continue;
        check(random, {.type = DType::kF32,
                       .rows = 1 + out % 7,
                       .heads = 2,
                       .in = in,
                       .out = out,
                       .copied = in % 3,
                       .transposed = transposed,
                       .w_slack = 1});
        if (HasFatalFailure()) return;
      }
}

// The shapes of DeepSeek-V2-Lite, GLM-4.7-Flash, and of many rows.
TEST_P(HeadLinears, TakeTheShapesOfModels) {
  if (is_variation()) return;
  session.chunk = 1040;
  Random random;
  for (const uint32_t rows : {1u, smaller(40, 9)}) {
    check(random, {DType::kQ8_0, rows, smaller(16, 3), 128, 512, 64});
    check(random, {DType::kQ8_0, rows, smaller(16, 3), 512, 128});
    check(random, {DType::kQ8_0, rows, smaller(20, 2), 192, 512, 64});
    check(random, {DType::kQ4_K, rows, smaller(20, 2), 512, 256});
    check(random, {DType::kQ4_K, rows, smaller(16, 2), 128, 512, 64, true, 128});
    if (HasFatalFailure()) return;
  }
  check(random, {DType::kF16, smaller(1030, 70), 2, 96, 65, 5});
  check(random, {DType::kF16, smaller(1030, 70), 2, 96, 65, 5, true});
}

TEST_P(HeadLinears, MultiplyByTheScaleOfTheirMatrix) {
  Random random;
  for (const bool transposed : {false, true})
    check(random, {.type = DType::kQ8_0,
                   .rows = 3,
                   .heads = 2,
                   .in = 32,
                   .out = 64,
                   .copied = 8,
                   .transposed = transposed,
                   .scale = 0.37f});
}

}  // namespace
}  // namespace thimble::test
