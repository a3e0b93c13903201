// The ops without a KV cache, on every device, compared with plain loops in double.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cpu/kernels.h"
#include "tests/ops/op_test.h"
#include "tests/ops/random_matrix.h"

namespace thimble::test {
namespace {

#define X(name, number, block, bytes) DType::k##name,
constexpr DType kTypes[] = {THIMBLE_DTYPES(X)};
#undef X

// Whether devices have separate code for a type's products. The products of other types differ only in how a
// block is expanded, so fewer shapes suffice for them.
bool has_own_products(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kQ8_0:
    case DType::kQ4_0:
    case DType::kQ4_1:
    case DType::kQ5_0:
    case DType::kQ5_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
    case DType::kQ6_K:
      return true;
    default:
      return false;
  }
}

// A matrix with whole numbers of at most 135 as values. They, their products and their sums are exact in
// every format and in any order.
Matrix whole_matrix(Random& random, DType type, uint32_t rows, uint32_t cols) {
  const DTypeInfo& info = dtype_info(type);
  Matrix m = random_matrix(random, type, rows, cols);
  for (size_t block = 0; block < m.bytes.size(); block += info.block_bytes) {
    std::byte* at = &m.bytes[block];
    const auto keep_bits = [&](size_t first, size_t count, uint8_t mask) {
      for (size_t i = 0; i < count; ++i) at[first + i] &= std::byte{mask};
    };
    const float f = static_cast<float>(random.below(31)) - 15;
    switch (type) {
      case DType::kF32:
        std::memcpy(at, &f, sizeof f);
        break;
      case DType::kBF16:
        std::memcpy(at, reinterpret_cast<const std::byte*>(&f) + 2, 2);
        break;
      case DType::kF16:
      case DType::kTQ1_0:
      case DType::kTQ2_0:
      case DType::kQ1_0:
      case DType::kQ2_0:
        put_half(at + halves_of(type)[0], f);
        break;
      case DType::kQ8_0:  // -128 to 127
      case DType::kQ4_0:
      case DType::kQ5_0:
      case DType::kIQ4_NL:
      case DType::kQ3_K:
        put_half(at + halves_of(type)[0], 1);
        break;
      case DType::kQ4_1:
      case DType::kQ5_1:
        put_half(at, 1);
        put_half(at + 2, -7);
        break;
      case DType::kQ2_K:
        put_half(at + 80, 1);
        put_half(at + 82, 1);
        break;
      case DType::kQ4_K:
      case DType::kQ5_K:  // scales and minima of 0 to 3: at most 3 * 31
        put_half(at, 1);
        put_half(at + 2, 1);
        keep_bits(4, 8, 0x03);
        keep_bits(12, 4, 0x33);
        break;
      case DType::kQ6_K:  // scales of -3 to 3
        put_half(at + 208, 1);
        for (size_t i = 0; i < 16; ++i) at[192 + i] = static_cast<std::byte>(int(random.below(7)) - 3);
        break;
      case DType::kMXFP4:  // 2^x times 0 to 12
        at[0] = static_cast<std::byte>(128 + random.below(4));
        break;
      case DType::kNVFP4:  // 12 times half of 16 to 22, or of 2 to 16
        for (size_t i = 0; i < 4; ++i)
          at[i] = static_cast<std::byte>(i % 2 ? 0x58 + random.below(4) : (8 + random.below(4)) << 3);
        break;
      case DType::kIQ4_XS:  // scales of 32 or 33, from which 32 is subtracted
        put_half(at, 1);
        at[2] = at[3] = std::byte{0xaa};
        keep_bits(4, 4, 0x11);
        break;
      case DType::kIQ3_S:  // (2 * scale + 1) * 15, scales of 0 to 3
        put_half(at, 1);
        keep_bits(106, 4, 0x33);
        break;
      case DType::kIQ3_XXS:  // (scale + 1/2) / 2 * 62, scales of 0 and 1
        put_half(at, 2);
        for (size_t i = 0; i < 8; ++i) keep_bits(66 + 4 * i + 3, 1, 0x1f);
        break;
      case DType::kIQ2_S:  // (scale + 1/2) / 4 * 43, scales of 0 and 1
      case DType::kIQ2_XS:
        put_half(at, 8);
        keep_bits(dtype_info(type).block_bytes - 8, 8, 0x11);
        break;
      case DType::kIQ2_XXS:
        put_half(at, 8);
        for (size_t i = 0; i < 8; ++i) keep_bits(2 + 8 * i + 7, 1, 0x1f);
        break;
      case DType::kIQ1_S:  // (2 * scale + 1) * (1 + 1/8), scales of 0 to 7
        put_half(at, 8);
        break;
      case DType::kIQ1_M:
        put_iq1_m_scale(at, 8);
        break;
    }
  }
  read_values(m, type, rows, cols);
  return m;
}

// Rows of x with `stride` elements each, with poison between and after them.
std::vector<float> strided(const std::vector<float>& x, uint32_t rows, uint32_t cols, uint32_t stride,
                           uint32_t max_rows) {
  std::vector<float> all = padded_rows(std::vector<float>(), size_t(max_rows) * stride);
  for (uint32_t r = 0; r < rows; ++r) std::copy_n(&x[size_t(r) * cols], cols, &all[size_t(r) * stride]);
  return all;
}

class DenseOps : public OpTest {
 protected:
  // Whether a type is tested in all shapes. On a software driver, one type for each kind of code is; for the
  // others only the meaning of a block is tested.
  bool takes_all_shapes(DType type) const {
    if (type == DType::kF16 || type == DType::kQ4_K) return true;
    return !is_slow() || (!is_variation() && (type == DType::kF32 || type == DType::kQ8_0));
  }
  std::vector<DType> types() const {
    std::vector<DType> all;
    for (const DType type : kTypes)
      if (!is_variation() || takes_all_shapes(type)) all.push_back(type);
    return all;
  }

  // A product: `rows` rows in a program for max_rows.
  struct LinearCase {
    DType type;
    uint32_t rows, n, cols;
    bool bias = false, add = false;
    uint32_t max_rows = 0;              // 0: three more than rows
    uint32_t x_slack = 5, y_slack = 3;  // elements between rows
    float x_max = 1;
    bool whole = false;  // whole numbers, whose products must be exact on every device
    float scale = 1;     // of W
    bool exact = false;
  };
  static Weight scaled(Weight w, float scale) {
    w.scale = scale;
    return w;
  }

  void check_linear(Random& random, const LinearCase& c) {
    const uint32_t n = c.n, cols = c.cols, rows = c.rows, max_rows = c.max_rows ? c.max_rows : rows + 3;
    SCOPED_TRACE(::testing::Message() << dtype_info(c.type).name << ": " << rows << " of " << max_rows
                                      << " rows, W [" << cols << "][" << n << "]" << (c.bias ? ", bias" : "")
                                      << (c.add ? ", add" : "") << (c.whole ? ", whole numbers" : "")
                                      << ", scale " << c.scale << (c.exact ? ", exact" : ""));
    clear();
    const uint32_t x_stride = n + c.x_slack, y_stride = cols + c.y_slack;
    const Matrix w = (c.whole ? whole_matrix : random_matrix)(random, c.type, cols, n);
    const auto values = [&](size_t count) {
      std::vector<float> v = random.floats(count, -c.x_max, c.x_max);
      if (c.whole)
        for (float& f : v) f = std::trunc(f);
      return v;
    };
    const std::vector<float> x = values(size_t(rows) * n), b = values(cols),
                             before = values(size_t(rows) * cols);
    const View y = c.add ? inout(strided(before, rows, cols, y_stride, max_rows))
                         : output<float>(size_t(max_rows) * y_stride);
    const Linear op{input(strided(x, rows, n, x_stride, max_rows)),
                    scaled(weight(c.type, cols, n, w.bytes), c.scale),
                    c.bias ? input(b) : View(),
                    y,
                    {.in_cols = n,
                     .out_cols = cols,
                     .x_stride = x_stride,
                     .y_stride = y_stride,
                     .add = c.add,
                     .rows = kStepRows},
                    c.exact};
    run({.n_rows = rows}, max_rows, [&](Recorder& r) { r.record(op); });
    const std::vector<float> got = get<float>(y);
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t i = 0; i < cols; ++i) {
        const Product p = product(w, i, &x[size_t(r) * n], n, c.bias ? double{b[i]} : 0,
                                  c.add ? double{before[size_t(r) * cols + i]} : 0,
                                  rounds_to_f16(max_rows, kStepRows, c.exact) && !c.whole, double{c.scale});
        ASSERT_NEAR(got[size_t(r) * y_stride + i], p.sum, c.whole ? 0 : p.tolerance)
            << "at " << r << ", " << i;
      }
      ASSERT_TRUE(is_poison(got, size_t(r) * y_stride + cols, c.y_slack)) << "wrote past row " << r;
    }
    if (GetParam() == "cpu") {  // other devices may compute rows beyond n_rows, which are never read
      ASSERT_TRUE(is_poison(got, size_t(rows) * y_stride, size_t(max_rows - rows) * y_stride));
    }
  }

  // Depths around the block size of a type.
  static std::vector<uint32_t> depths(DType type) {
    const uint32_t block = dtype_info(type).block;
    return block == 1    ? std::vector<uint32_t>{1, 31, 33, 1000}
           : block == 32 ? std::vector<uint32_t>{32, 96, 544}
           : block < 256 ? std::vector<uint32_t>{block, 5 * block}
                         : std::vector<uint32_t>{256, 768};
  }
};
THIMBLE_SHARED_OP_TESTS(DenseOps);

TEST_P(DenseOps, LinearMultipliesEveryTypeAndShape) {
  Random random;
  uint32_t variant = 0;
  for (DType type : types())
    for (uint32_t n : depths(type))
      for (uint32_t cols : {1u, 31u, 33u, 130u})
        for (uint32_t rows : {1u, 2u, 4u, 5u, 13u}) {
          if ((rows == 4 || rows == 13) && !has_own_products(type)) continue;
          if (rows != 5 && !takes_all_shapes(type)) continue;
          check_linear(random, {type, rows, n, cols, (variant & 1) != 0, (variant & 2) != 0});
          if (HasFatalFailure()) return;
          variant += 1 + variant % 3;
        }
}

// The programs of decode: a single row.
TEST_P(DenseOps, LinearMultipliesOneRowOfEveryType) {
  Random random;
  for (DType type : types())
    for (uint32_t n : depths(type))
      for (uint32_t cols : {1u, 33u, 1000u})
        for (bool add : {false, true}) {
          if (n != depths(type).back() && !takes_all_shapes(type)) continue;
          check_linear(random, {type, 1, n, cols, !add, add, 1});
          if (HasFatalFailure()) return;
        }
}

TEST_P(DenseOps, LinearMultipliesManyRowsAndLongOnes) {
  session.chunk = 1040;
  Random random;
  check_linear(random, {DType::kQ8_0, 1000, 32, 33, true, false});
  if (is_variation()) return;
  check_linear(random, {DType::kF32, 1030, 31, 70, false, true});
  check_linear(random, {DType::kF16, 130, 96, 65, true, true});
  check_linear(random, {DType::kQ4_K, 130, 2816, 65, true, true});
  check_linear(random, {DType::kQ6_K, 1, 4096, 130, true, true, 1});
  // Enough columns for a device to process several batches of them.
  for (DType type : {DType::kQ4_K, DType::kQ5_K, DType::kQ6_K, DType::kQ8_0})
    check_linear(random, {type, 1, 768, 2113, true, true, 1});
  for (uint32_t slack : {0u, 1u})
    check_linear(
        random,
        {.type = DType::kF16, .rows = 3, .n = 33000, .cols = 9, .x_slack = slack, .x_max = 8, .whole = true});
  // Real models reach 1e5 before ffn_down, which f16 cannot hold without a scale.
  check_linear(random, {.type = DType::kQ4_K, .rows = 40, .n = 768, .cols = 33, .x_max = 2e5f});
}

// A few columns for as many rows as there are.
TEST_P(DenseOps, ExactLinearDoesNotRound) {
  Random random;
  for (const DType type : {DType::kF32, DType::kF16, DType::kQ8_0})
    for (const uint32_t rows : {2u, 70u, 130u})
      check_linear(random, {.type = type, .rows = rows, .n = 256, .cols = 32, .exact = true});
}

// Each output is a single number of x, from a row whose other numbers are up to 1e8 times as large, so the
// effect of scaling shows. Rows with NaN or infinity keep it, and do not affect the rows next to them.
TEST_P(DenseOps, LinearKeepsSmallNumbersNextToLargeOnes) {
  constexpr uint32_t n = 40;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Matrix unit{std::vector<std::byte>(n * n * sizeof(float)), std::vector<float>(n * n)};
  for (uint32_t i = 0; i < n; ++i) unit.values[i * n + i] = 1;
  std::memcpy(unit.bytes.data(), unit.values.data(), unit.bytes.size());
  Random random;
  std::vector<float> x;
  const auto add_row = [&](float scale, float special) {
    for (uint32_t i = 0; i < n; ++i) {
      const float magnitude = scale * std::pow(10.0f, random.uniform(-3, 5));
      x.push_back(i == 7 && special != 0 ? special : random.below(2) ? magnitude : -magnitude);
    }
  };
  add_row(1, 0);
  add_row(0, 0);
  add_row(1e-25f, 0);
  add_row(1, -kInfinity);
  add_row(1e25f, 0);
  add_row(1, std::numeric_limits<float>::quiet_NaN());
  add_row(1, 0);
  const uint32_t rows = static_cast<uint32_t>(x.size()) / n;
  for (const uint32_t max_rows : fewer({9, 70, 150}, {9, 70, 150}, {70}))
    for (const uint32_t slack : {0u, 1u}) {
      SCOPED_TRACE(::testing::Message() << "a program for " << max_rows << " rows, slack " << slack);
      clear();
      const View y = output<float>(max_rows * n);
      const Linear op{input(strided(x, rows, n, n + slack, max_rows)),
                      weight(DType::kF32, n, n, unit.bytes),
                      {},
                      y,
                      {.in_cols = n, .out_cols = n, .x_stride = n + slack, .y_stride = n, .rows = kStepRows}};
      run({.n_rows = rows}, max_rows, [&](Recorder& r) { r.record(op); });
      const std::vector<float> got = get<float>(y);
      for (uint32_t r = 0; r < rows; ++r)
        for (uint32_t c = 0; c < n; ++c) {
          if (!std::isfinite(x[r * n + 7])) {
            ASSERT_FALSE(std::isfinite(got[r * n + c])) << "at " << r << ", " << c;
            continue;
          }
          const Product p = product(unit, c, &x[r * n], n, 0, 0, rounds_to_f16(max_rows));
          ASSERT_NEAR(got[r * n + c], p.sum, p.tolerance) << "at " << r << ", " << c;
        }
    }
}

// Blocks of whole numbers, all 0 except a 1 in column column_of(row).
template <typename ColumnOf>
Matrix picking_matrix(DType type, uint32_t rows, uint32_t cols, const ColumnOf& column_of) {
  const DTypeInfo& info = dtype_info(type);
  Matrix m{std::vector<std::byte>(dtype_bytes(type, uint64_t(rows) * cols)),
           std::vector<float>(size_t(rows) * cols)};
  const uint16_t one = f32_to_f16(1);
  for (size_t block = 0; block < m.bytes.size(); block += info.block_bytes) {
    std::byte* at = &m.bytes[block];
    if (type == DType::kQ6_K) {  // numbers have 32 added: sets bit 1 of their upper two bits
      std::fill_n(at + 128, 64, std::byte{0xaa});
      std::fill_n(at + 192, 16, std::byte{1});
      std::memcpy(at + 208, &one, sizeof one);
    } else {  // scales of 1, in 6 bits of the first four bytes and in 4 bits of the last, and minima of 0
      std::memcpy(at, &one, sizeof one);
      std::fill_n(at + 4, 4, std::byte{1});
      std::fill_n(at + 12, 4, std::byte{1});
    }
  }
  for (uint32_t r = 0; r < rows; ++r) {
    const uint32_t c = column_of(r), i = c % info.block, group = i / 32;
    std::byte* at = &m.bytes[(uint64_t(r) * cols + c) / info.block * info.block_bytes];
    if (type == DType::kQ6_K)
      at[group / 4 * 64 + group % 2 * 32 + i % 32] |= std::byte{1} << group % 4 / 2 * 4;
    else
      at[info.block_bytes - 128 + group / 2 * 32 + i % 32] |= std::byte{1} << group % 2 * 4;
  }
  read_values(m, type, rows, cols);
  return m;
}

// The same for a single row and blocks of 256. Numbers of x may then be multiplied as integers of at least 22
// bits plus sign, in a unit that at most 256 neighbours share. The error of each is at most 2^-22 of the
// largest of these.
TEST_P(DenseOps, LinearOfBlocksKeepsSmallNumbersNextToLargeOnes) {
  constexpr uint32_t n = 768, cols = 96, kNeighbours = 256;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto column_of = [](uint32_t row) { return row * 8 + row % 8; };
  Random random;
  for (const DType type : {DType::kQ4_K, DType::kQ5_K, DType::kQ6_K}) {
    const Matrix w = picking_matrix(type, cols, n, column_of);
    for (const float special : {0.0f, kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      SCOPED_TRACE(::testing::Message() << dtype_info(type).name << ", next to " << special);
      clear();
      std::vector<float> x(n), largest(n / kNeighbours);
      for (uint32_t i = 0; i < n; ++i) {
        // The range within a row is too large for a common unit
        const float scale = i / kNeighbours % 2 ? 1e-12f : 1e8f;
        x[i] = scale * std::pow(10.0f, random.uniform(-5, 3)) * (random.below(2) ? 1.0f : -1.0f);
        largest[i / kNeighbours] = std::max(largest[i / kNeighbours], std::fabs(x[i]));
      }
      if (special != 0) x[300] = special;
      const View y = output<float>(cols);
      const Linear op{input(x),
                      weight(type, cols, n, w.bytes),
                      {},
                      y,
                      {.in_cols = n, .out_cols = cols, .x_stride = n, .y_stride = cols, .rows = kStepRows}};
      run({.n_rows = 1}, 1, [&](Recorder& r) { r.record(op); });
      const std::vector<float> got = get<float>(y);
      for (uint32_t c = 0; c < cols; ++c) {
        if (special != 0) {
          ASSERT_FALSE(std::isfinite(got[c])) << "at " << c;
          continue;
        }
        const Product p = product(w, c, x.data(), n, 0, 0, false);
        ASSERT_NEAR(got[c], p.sum, p.tolerance + 0x1p-22 * largest[column_of(c) / kNeighbours]) << "at " << c;
      }
    }
  }
}

// Wide rows, as in a model: dense, or columns of a wider matrix.
TEST_P(DenseOps, LinearOfWholeNumbersIsExact) {
  Random random;
  for (DType type : types()) {
    const uint32_t n = dtype_info(type).block == 1 ? 1000 : 1024;
    // How rows of x are read does not depend on the type.
    const bool all_slacks = type == DType::kF16 || type == DType::kQ8_0 || type == DType::kQ4_K;
    for (uint32_t rows : {1u, 16u, 33u, 200u})
      for (uint32_t slack : {0u, 3u, 64u}) {
        if (slack != 3 && !all_slacks) continue;
        if (rows == 33 && !has_own_products(type)) continue;
        if (rows < 200 && !takes_all_shapes(type)) continue;
        check_linear(random, {.type = type,
                              .rows = rows,
                              .n = n,
                              .cols = 260,
                              .add = slack == 3,
                              .max_rows = rows + (rows > 1 ? 7 : 0),
                              .x_slack = slack,
                              .y_slack = slack,
                              .x_max = 8,
                              .whole = true});
        if (HasFatalFailure()) return;
      }
  }
}

TEST_P(DenseOps, LinearTakesFewerRowsThanItsProgramIsFor) {
  Random random;
  for (uint32_t max_rows : {2u, 32u, 256u})
    for (uint32_t rows : {1u, 2u, 31u, 33u, 129u})
      for (bool whole : {false, true}) {
        if (rows > max_rows) continue;
        check_linear(random, {.type = DType::kQ4_K,
                              .rows = rows,
                              .n = 512,
                              .cols = 96,
                              .bias = true,
                              .max_rows = max_rows,
                              .x_max = whole ? 8.0f : 1.0f,
                              .whole = whole});
        if (HasFatalFailure()) return;
      }
}

// The scale of a matrix multiplies its product, before the bias and what y held are added.
TEST_P(DenseOps, LinearMultipliesByTheScaleOfItsMatrix) {
  Random random;
  bool bias = false;
  for (const DType type : {DType::kNVFP4, DType::kF32, DType::kQ4_K})
    for (const uint32_t max_rows : {1u, 4u, 40u, 200u})
      for (const bool add : {false, true}) {
        if (is_slow() && (type == DType::kF32 || max_rows == 4)) continue;
        check_linear(random, {.type = type,
                              .rows = max_rows == 1 ? 1 : max_rows - 3,
                              .n = 512,
                              .cols = 70,
                              .bias = bias,
                              .add = add,
                              .max_rows = max_rows,
                              .scale = add ? 0.3f : -700});
        bias = !bias || add;
        if (HasFatalFailure()) return;
      }
}

// q, k and v of a layer: different types and widths, adjacent in y.
TEST_P(DenseOps, LinearsOfTheSameRowsWriteTheirOwnColumns) {
  struct Sibling {
    DType type;
    uint32_t cols;
    bool bias;
    float scale = 1;
  };
  Random random;
  for (const uint32_t max_rows : {1u, 50u, 150u})
    for (const std::vector<Sibling>& siblings :
         {std::vector<Sibling>{
              {DType::kQ4_K, 256, false}, {DType::kQ4_K, 64, false}, {DType::kQ6_K, 64, false}},
          std::vector<Sibling>{{DType::kQ8_0, 130, true}, {DType::kF16, 33, true}, {DType::kQ5_0, 31, false}},
          std::vector<Sibling>{{DType::kQ4_0, 96, false}, {DType::kQ4_0, 32, true}},
          std::vector<Sibling>{{DType::kNVFP4, 96, false, 0.3f},
                               {DType::kNVFP4, 40, false, 0.3f},
                               {DType::kNVFP4, 40, false, 5}},
          std::vector<Sibling>{{DType::kF32, 64, false},
                               {DType::kQ4_K, 1, false},
                               {DType::kQ4_K, 1, false},
                               {DType::kBF16, 64, true}}}) {
      if (is_variation() && siblings.size() != 3) continue;
      clear();
      const uint32_t n = 512, rows = max_rows == 1 ? 1 : 41;
      uint32_t width = 0;
      for (const Sibling& s : siblings) width += s.cols;
      const std::vector<float> x = random.floats(size_t(rows) * n);
      const View from = input(padded_rows(x, size_t(max_rows) * n)),
                 y = output<float>(size_t(max_rows) * width);
      std::vector<Matrix> matrices;
      std::vector<std::vector<float>> biases;
      std::vector<Linear> ops;
      uint32_t column = 0;
      for (const Sibling& s : siblings) {
        matrices.push_back(random_matrix(random, s.type, s.cols, n));
        biases.push_back(s.bias ? random.floats(s.cols) : std::vector<float>(s.cols));
        ops.push_back(
            {from,
             scaled(weight(s.type, s.cols, n, matrices.back().bytes), s.scale),
             s.bias ? input(biases.back()) : View(),
             y.slice(column * sizeof(float), y.bytes - column * sizeof(float)),
             {.in_cols = n, .out_cols = s.cols, .x_stride = n, .y_stride = width, .rows = kStepRows}});
        column += s.cols;
      }
      run({.n_rows = rows}, max_rows, [&](Recorder& r) {
        for (const Linear& op : ops) r.record(op);
      });
      const std::vector<float> got = get<float>(y);
      for (uint32_t row = 0; row < rows; ++row) {
        column = 0;
        for (size_t s = 0; s < siblings.size(); ++s)
          for (uint32_t c = 0; c < siblings[s].cols; ++c, ++column) {
            const Product p = product(matrices[s], c, &x[size_t(row) * n], n, double{biases[s][c]}, 0,
                                      rounds_to_f16(max_rows), double{siblings[s].scale});
            ASSERT_NEAR(got[size_t(row) * width + column], p.sum, p.tolerance)
                << "row " << row << ", matrix " << s << ", column " << c;
          }
      }
    }
}

TEST_P(DenseOps, LinearOfLogitsUsesTheRowsOfLogits) {
  Random random;
  for (const uint32_t rows : {1u, 2u, 16u}) {
    clear();
    const uint32_t max_rows = 40, cols = 300, n = 768;
    const Matrix w = random_matrix(random, DType::kQ6_K, cols, n);
    const std::vector<float> x = random.floats(size_t(rows) * n);
    // There are at most 16 rows of logits, regardless of the program
    const View y = output<float>(16 * cols);
    const Linear op{input(padded_rows(x, 16 * n)),
                    weight(DType::kQ6_K, cols, n, w.bytes),
                    View(),
                    y,
                    {.in_cols = n, .out_cols = cols, .x_stride = n, .y_stride = cols, .rows = kLogitRows}};
    run({.n_rows = max_rows, .n_logit_rows = rows}, max_rows, [&](Recorder& r) { r.record(op); });
    const std::vector<float> got = get<float>(y);
    for (uint32_t i = 0; i < rows * cols; ++i) {
      const Product p =
          product(w, i % cols, &x[size_t(i / cols) * n], n, 0, 0, rounds_to_f16(max_rows, kLogitRows));
      ASSERT_NEAR(got[i], p.sum, p.tolerance)
          << "at " << i / cols << ", " << i % cols << " of " << rows << " rows";
    }
    if (GetParam() == "cpu") {
      EXPECT_TRUE(is_poison(got, rows * cols, (16 - rows) * cols));
    }
  }
}

TEST_P(DenseOps, GluMultipliesTheActivatedGate) {
  struct Rows {
    uint32_t n, most;
  };
  Random random;
  uint32_t variant = 0;
  DType other = DType::kQ6_K;  // of the up, if it differs from the gate's: the previous type
  for (DType type : types()) {
    for (const Rows rows : {Rows{1, 1}, Rows{1, 3}, Rows{3, 5}, Rows{37, 39}, Rows{1, 64}, Rows{33, 300}})
      for (uint32_t cols : {1u, 33u, 300u})
        for (const uint32_t kind : {0u, 1u, 2u, 3u}) {
          const bool whole = kind == 1, mixed = kind == 2, has_scales = kind == 3;
          if (has_scales && (cols != 33 || (type != DType::kF16 && type != DType::kNVFP4))) continue;
          const float gate_scale = has_scales ? 0.3f : 1, up_scale = has_scales ? -5.0f : 1;
          if (rows.most != 1 && rows.most != 300 && !has_scales && !has_own_products(type)) continue;
          if (mixed && (rows.most != 1 || cols != 33 || !has_own_products(type))) continue;
          if ((rows.most != 1 || cols != 33) && !has_scales && !takes_all_shapes(type)) continue;
          const DType up_type = mixed ? other : type;
          const uint32_t act = variant % 2 ? kActGelu : kActSilu,
                         n = dtype_info(type).block == 1 && !mixed ? 225 : 256;
          ++variant;
          SCOPED_TRACE(::testing::Message()
                       << dtype_info(type).name << " and " << dtype_info(up_type).name << ", act " << act
                       << ", " << rows.n << " of " << rows.most << " rows, " << cols << " columns"
                       << (whole ? ", whole numbers" : "") << (has_scales ? ", scales" : ""));
          clear();
          const auto make = whole ? whole_matrix : random_matrix;
          const Matrix gate = make(random, type, cols, n), up = make(random, up_type, cols, n);
          std::vector<float> x =
              random.floats(size_t(rows.n) * n, whole ? -8.0f : -1.0f, whole ? 8.0f : 1.0f);
          if (whole)  // products are multiples of 2^-10, so they are exact, also where the activation bends
            for (float& f : x) f = std::trunc(f) * 0x1p-10f;
          const View h = output<float>(size_t(rows.most) * cols);
          const Glu op{input(padded_rows(x, size_t(rows.most) * n)),
                       scaled(weight(type, cols, n, gate.bytes), gate_scale),
                       scaled(weight(up_type, cols, n, up.bytes), up_scale),
                       h,
                       {.in_cols = n, .out_cols = cols, .act = act}};
          run({.n_rows = rows.n}, rows.most, [&](Recorder& r) { r.record(op); });
          const std::vector<float> got = get<float>(h);
          const bool f16 = rounds_to_f16(rows.most);
          for (uint32_t r = 0; r < rows.n; ++r)
            for (uint32_t c = 0; c < cols; ++c) {
              Product g = product(gate, c, &x[size_t(r) * n], n, 0, 0, f16, double{gate_scale}),
                      u = product(up, c, &x[size_t(r) * n], n, 0, 0, f16, double{up_scale});
              if (whole) g.tolerance = u.tolerance = 0;
              const double inner =
                  act == kActSilu ? g.sum : 1.5957691216 * (g.sum + 0.044715 * g.sum * g.sum * g.sum);
              const double activated = g.sum / (1 + std::exp(-inner));
              // The slopes of silu and gelu stay below 1.13. Added to that are the activation's own error
              // (kernels_test), the product's error, and underflow. With f16, CUDA's fast exponential (2 +
              // 1.16 |inner| ulp) and division (2 ulp) are accurate enough too; inner itself is off by 5 half
              // ulps.
              const double own = f16 ? 12 + 8 * std::fabs(inner) : 8 + 4 * std::fabs(inner);
              const double tolerance = 1.13 * g.tolerance * (std::fabs(u.sum) + u.tolerance) +
                                       std::fabs(activated) * u.tolerance +
                                       std::fabs(activated * u.sum) * own * 0x1p-24 + 0x1p-100;
              ASSERT_NEAR(got[size_t(r) * cols + c], activated * u.sum, tolerance) << "at " << r << ", " << c;
            }
          if (GetParam() == "cpu") {
            ASSERT_TRUE(is_poison(got, size_t(rows.n) * cols, size_t(rows.most - rows.n) * cols));
          }
        }
    other = type;
  }
}

// A device may compute a norm and the products that read it in one launch, or let the linear that makes its x
// prepare half of the norm. In each case the norm must be written, and the products must use it.
TEST_P(DenseOps, ProductsMultiplyTheNormBeforeThem) {
  struct Shape {
    DType type;
    uint32_t n;
    bool has_scales = false;
  };
  Random random;
  for (const uint32_t rows : {1u, 3u})
    for (const uint32_t order : {0u, 1u, 2u, 3u})
      // One strip of CUDA's products or several, and more strips than a block has warps.
      for (const Shape shape :
           {Shape{DType::kF32, 33}, Shape{DType::kF32, 200}, Shape{DType::kF32, 2100},
            Shape{DType::kF16, 300}, Shape{DType::kBF16, 2500}, Shape{DType::kQ4_0, 544},
            Shape{DType::kQ4_K, 512}, Shape{DType::kQ6_K, 5120}, Shape{DType::kNVFP4, 512, true}}) {
        const bool taken =
            shape.has_scales || shape.type == DType::kF16 || shape.type == DType::kQ4_K || shape.n == 200;
        if (is_slow() && !taken) continue;
        const uint32_t n = shape.n, cols = 45;
        const bool glu_first = order % 2, after_linear = order >= 2;
        SCOPED_TRACE(::testing::Message()
                     << dtype_info(shape.type).name << ", " << rows << " rows of " << n
                     << (glu_first ? ", glu first" : "") << (after_linear ? ", after a linear" : ""));
        clear();
        const std::vector<float> before = random.floats(size_t(rows) * n, -50, 50), w = random.floats(n);
        const auto scale_of = [&](uint32_t i) { return shape.has_scales ? 0.3f + static_cast<float>(i) : 1; };
        const uint32_t added = 256;
        // The last strip has few columns
        const DType type = shape.type == DType::kF32 ? DType::kQ8_0 : shape.type;
        const Matrix add = random_matrix(random, type, n, added);
        const Linear make_x{
            input(random.floats(size_t(rows) * added)),
            scaled(weight(type, n, added, add.bytes), scale_of(4)),
            View(),
            inout(before),
            {.in_cols = added, .out_cols = n, .x_stride = added, .y_stride = n, .add = 1, .rows = kStepRows}};
        Matrix matrices[4];
        for (Matrix& m : matrices) m = random_matrix(random, shape.type, cols, n);
        const auto weights_of = [&](uint32_t i) {
          return scaled(weight(shape.type, cols, n, matrices[i].bytes), scale_of(i));
        };
        const View norm = output<float>(size_t(rows) * n), y = output<float>(size_t(rows) * 2 * cols),
                   h = output<float>(size_t(rows) * cols);
        const RmsNorm make{make_x.y,
                           input(w),
                           norm,
                           {.cols = n, .groups = 1, .row_stride = n, .eps = 1e-6f, .rows = kStepRows}};
        const LinearParams p{
            .in_cols = n, .out_cols = cols, .x_stride = n, .y_stride = 2 * cols, .add = 0, .rows = kStepRows};
        const Linear first{norm, weights_of(0), View(), y, p},
            second{norm, weights_of(1), View(), y.slice(cols * sizeof(float), y.bytes - cols * sizeof(float)),
                   p};
        const Glu glu{
            norm, weights_of(2), weights_of(3), h, {.in_cols = n, .out_cols = cols, .act = kActSilu}};
        run({.n_rows = rows}, rows, [&](Recorder& r) {
          if (after_linear) r.record(make_x);
          r.record(make);
          if (glu_first) r.record(glu);
          r.record(first);
          r.record(second);
          if (!glu_first) r.record(glu);
        });
        const std::vector<float> x = get<float>(make_x.y), of_norm = get<float>(norm), of_y = get<float>(y),
                                 of_h = get<float>(h);
        for (uint32_t row = 0; row < rows; ++row) {
          double squares = 0;
          for (uint32_t i = 0; i < n; ++i)
            squares += double{x[size_t(row) * n + i]} * double{x[size_t(row) * n + i]};
          const double scale = 1 / std::sqrt(squares / n + 1e-6);
          for (uint32_t i = 0; i < n; ++i) {  // tolerance: RmsNormScalesGroupsOfStridedRows
            const double exact = double{x[size_t(row) * n + i]} * scale * double{w[i]};
            ASSERT_NEAR(of_norm[size_t(row) * n + i], exact, std::fabs(exact) * (n / 2.0 + 7) * 0x1p-24);
          }
          const auto of = [&](uint32_t i, uint32_t c) {
            return product(matrices[i], c, &of_norm[size_t(row) * n], n, 0, 0, rounds_to_f16(rows),
                           double{scale_of(i)});
          };
          for (uint32_t c = 0; c < cols; ++c) {
            const Product a = of(0, c), b = of(1, c), gate = of(2, c), up = of(3, c);
            ASSERT_NEAR(of_y[size_t(row) * 2 * cols + c], a.sum, a.tolerance) << row << ", " << c;
            ASSERT_NEAR(of_y[size_t(row) * 2 * cols + cols + c], b.sum, b.tolerance) << row << ", " << c;
            // As in GluMultipliesTheActivatedGate.
            const double activated = gate.sum / (1 + std::exp(-gate.sum));
            ASSERT_NEAR(of_h[size_t(row) * cols + c], activated * up.sum,
                        1.13 * gate.tolerance * (std::fabs(up.sum) + up.tolerance) +
                            std::fabs(activated) * up.tolerance +
                            std::fabs(activated * up.sum) * (12 + 8 * std::fabs(gate.sum)) * 0x1p-24 +
                            0x1p-100)
                << row << ", " << c;
          }
        }
      }
}

// A matrix of few rows of floats, the only one that reads the norm. The tolerance allows three more roundings
// for a product in which the norm's scale is applied last.
TEST_P(DenseOps, ARouterMultipliesTheNormBeforeIt) {
  Random random;
  for (const uint32_t n : {33u, 200u, 2100u, 4500u})
    for (const uint32_t experts : {5u, 32u, 128u})
      for (const bool has_bias : {false, true}) {
        SCOPED_TRACE(::testing::Message() << experts << " of " << n << (has_bias ? ", bias" : ""));
        clear();
        const std::vector<float> x = random.floats(n, -50, 50), w = random.floats(n),
                                 bias = random.floats(experts);
        const Matrix router = random_matrix(random, DType::kF32, experts, n);
        const View norm = output<float>(n), y = output<float>(experts);
        const RmsNorm make{input(x),
                           input(w),
                           norm,
                           {.cols = n, .groups = 1, .row_stride = n, .eps = 1e-6f, .rows = kStepRows}};
        const Linear linear{norm,
                            weight(DType::kF32, experts, n, router.bytes),
                            has_bias ? input(bias) : View(),
                            y,
                            {.in_cols = n,
                             .out_cols = experts,
                             .x_stride = n,
                             .y_stride = experts,
                             .add = 0,
                             .rows = kStepRows}};
        run({.n_rows = 1}, 1, [&](Recorder& r) {
          r.record(make);
          r.record(linear);
        });
        const std::vector<float> of_norm = get<float>(norm), of_y = get<float>(y);
        double squares = 0;
        for (const float i : x) squares += double{i} * double{i};
        const double scale = 1 / std::sqrt(squares / n + 1e-6);
        for (uint32_t i = 0; i < n; ++i) {  // tolerance: RmsNormScalesGroupsOfStridedRows
          const double exact = double{x[i]} * scale * double{w[i]};
          ASSERT_NEAR(of_norm[i], exact, std::fabs(exact) * (n / 2.0 + 7) * 0x1p-24) << i;
        }
        for (uint32_t e = 0; e < experts; ++e) {
          const Product exact =
              product(router, e, of_norm.data(), n, has_bias ? double{bias[e]} : 0, 0, false);
          ASSERT_NEAR(of_y[e], exact.sum, exact.tolerance) << e;
        }
      }
}

// The bits must not depend on the number of threads, nor on when a device is opened.
TEST_P(DenseOps, ResultsDoNotDependOnThreads) {
  for (uint32_t rows : {1u, 4u, 5u, 300u}) {
    std::vector<std::vector<float>> results;
    for (uint32_t threads : fewer({1, 2, 3, 16}, {1, 16})) {
      open({.threads = threads});
      Random random;
      const Matrix a = random_matrix(random, DType::kQ8_0, 200, 640),
                   b = random_matrix(random, DType::kQ8_0, 200, 640);
      const View x = input(random.floats(size_t(rows) * 640)), y = output<float>(size_t(rows) * 200),
                 h = output<float>(size_t(rows) * 200);
      const Weight wa = weight(DType::kQ8_0, 200, 640, a.bytes), wb = weight(DType::kQ8_0, 200, 640, b.bytes);
      run({.n_rows = rows}, rows, [&](Recorder& r) {
        r.record(Linear{x,
                        wa,
                        View(),
                        y,
                        {.in_cols = 640,
                         .out_cols = 200,
                         .x_stride = 640,
                         .y_stride = 200,
                         .add = 0,
                         .rows = kStepRows}});
        r.record(Glu{x, wa, wb, h, {.in_cols = 640, .out_cols = 200, .act = kActSilu}});
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
  for (uint32_t cols : {1u, 31u, 33u, 64u, 128u, 1000u, 4096u})
    for (uint32_t groups : {1u, 3u})
      for (bool in_place : {false, true}) {
        const bool weighted = groups == 3 || in_place;
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
            weighted ? input(w) : View{},
            y,
            {.cols = cols, .groups = groups, .row_stride = stride, .eps = 1e-6f, .rows = kStepRows}};
        run({.n_rows = rows}, max_rows, [&](Recorder& r) { r.record(op); });
        const std::vector<float> got = get<float>(y);
        for (uint32_t v = 0; v < rows * groups; ++v) {
          double squares = 0;
          for (uint32_t i = 0; i < cols; ++i)
            squares += double{x[size_t(v) * cols + i]} * double{x[size_t(v) * cols + i]};
          const double scale = 1 / std::sqrt(squares / cols + 1e-6);
          for (uint32_t i = 0; i < cols; ++i) {
            const double exact = double{x[size_t(v) * cols + i]} * scale * (weighted ? double{w[i]} : 1);
            // The sum of squares is off by at most `cols` half ulps, which the root halves; six more
            // operations follow.
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

TEST_P(DenseOps, RmsNormMaySubtractTheMean) {
  Random random;
  for (const uint32_t cols : {1u, 31u, 64u, 1000u, 2304u, 9000u})
    for (const uint32_t add : {0u, 1u}) {
      if (is_slow() && add != cols % 2) continue;
      SCOPED_TRACE(::testing::Message() << cols << " columns, add " << add);
      clear();
      constexpr uint32_t kRows = 3, kMaxRows = 5;
      const std::vector<float> x = random.floats(kRows * cols, 4, 8), w = random.floats(cols),
                               before = random.floats(kRows * cols);
      const View y = inout(padded_rows(before, kMaxRows * cols));
      const RmsNorm op{input(padded_rows(x, kMaxRows * cols)),
                       input(w),
                       y,
                       {.cols = cols,
                        .groups = 1,
                        .row_stride = cols,
                        .eps = 1e-5f,
                        .rows = kStepRows,
                        .add = add,
                        .center = 1}};
      run({.n_rows = kRows}, kMaxRows, [&](Recorder& r) { r.record(op); });
      const std::vector<float> got = get<float>(y);
      for (uint32_t row = 0; row < kRows; ++row) {
        double mean = 0, size = 0, squares = 0;
        for (uint32_t i = 0; i < cols; ++i) {
          mean += double{x[row * cols + i]} / cols;
          size += std::fabs(double{x[row * cols + i]}) / cols;
        }
        for (uint32_t i = 0; i < cols; ++i) squares += std::pow(double{x[row * cols + i]} - mean, 2);
        const double scale = 1 / std::sqrt(squares / cols + 1e-5);
        for (uint32_t i = 0; i < cols; ++i) {
          const double normed = (double{x[row * cols + i]} - mean) * scale * double{w[i]};
          // The mean is off by a half ulp of the sum of magnitudes for each addition, and so is every
          // distance from it, which is rounded once more. The rest is as in
          // RmsNormScalesGroupsOfStridedRows, plus a sum.
          const double moved = (cols + 2) * 0x1p-24 * size * scale * std::fabs(double{w[i]});
          ASSERT_NEAR(got[row * cols + i], normed + add * double{before[row * cols + i]},
                      moved + std::fabs(normed) * (cols / 2.0 + 7) * 0x1p-24 + add * 4 * 0x1p-24);
        }
      }
    }
}

// The queries of qwen3.5 alternate with other numbers, and their norm puts them together.
TEST_P(DenseOps, RmsNormTakesVectorsWithOthersBetween) {
  constexpr uint32_t kRows = 5, kGroups = 3, kStride = 250;
  Random random;
  for (const uint32_t cols : {1u, 31u, 64u}) {
    SCOPED_TRACE(cols);
    clear();
    const RmsNormParams p{.cols = cols,
                          .groups = kGroups,
                          .row_stride = kGroups * cols + 4,
                          .eps = 1e-6f,
                          .rows = kStepRows,
                          .add = 0,
                          .x_row_stride = kStride,
                          .x_group_stride = cols + 7};
    const std::vector<float> x = random.floats(size_t{kRows} * kStride), w = random.floats(cols);
    const RmsNorm op{input(x), input(w), output<float>(size_t{kRows} * p.row_stride), p};
    if (!device().supports(op)) return;
    run({.n_rows = kRows}, kRows, [&](Recorder& r) { r.record(op); });
    const std::vector<float> got = get<float>(op.y);
    for (uint32_t row = 0; row < kRows; ++row) {
      for (uint32_t group = 0; group < kGroups; ++group) {
        const float* of = &x[row * kStride + group * p.x_group_stride];
        double squares = 0;
        for (uint32_t i = 0; i < cols; ++i) squares += double{of[i]} * double{of[i]};
        for (uint32_t i = 0; i < cols; ++i) {  // tolerance: RmsNormScalesGroupsOfStridedRows
          const double exact = double{of[i]} / std::sqrt(squares / cols + 1e-6) * double{w[i]};
          ASSERT_NEAR(got[row * p.row_stride + group * cols + i], exact,
                      std::fabs(exact) * (cols / 2.0 + 7) * 0x1p-24);
        }
      }
      ASSERT_TRUE(is_poison(got, row * p.row_stride + kGroups * cols, 4));
    }
  }
}

TEST_P(DenseOps, ActivationLeavesOtherRowsAlone) {
  Random random;
  for (uint32_t act : {kActSilu, kActGeluErf, kActReluSqr})
    for (uint32_t cols : {1u, 31u, 33u, 1000u})
      for (const bool has_times : {false, true}) {
        clear();
        const std::vector<float> x = random.floats(size_t(7) * cols, -8, 8),
                                 factors = random.floats(x.size());
        const View v = inout(padded_rows(x, size_t(9) * cols)),
                   times = has_times ? input(padded_rows(factors, size_t(9) * cols)) : View();
        run({.n_rows = 7}, 9, [&](Recorder& r) {
          r.record(Activation{v, {.cols = cols, .act = act}, times});
        });
        const std::vector<float> got = get<float>(v);
        for (size_t i = 0; i < x.size(); ++i) {
          const double a = x[i];
          const double activated = act == kActSilu      ? a / (1 + std::exp(-a))
                                   : act == kActGeluErf ? a / 2 * std::erfc(-a / std::sqrt(2))
                                                        : std::max(a, 0.0) * a;
          const double exact = has_times ? activated * double{factors[i]} : activated;
          // silu as in kernels_test; gelu as accurate as it is without erfc (gelu_erf.glsl). An erfc within 4
          // ulp whose argument has two roundings is no worse. The factor rounds once more.
          const double half_ulps = act == kActSilu ? 6 : act == kActGeluErf ? 20 + 2 * a * a : 1;
          ASSERT_NEAR(got[i], exact, std::fabs(exact) * (half_ulps + has_times) * 0x1p-24)
              << "act " << act << " of " << a;
        }
        if (GetParam() == "cpu") {
          EXPECT_TRUE(is_poison(got, x.size(), 2 * cols));
        }
      }
}

// Tests the middle, and the tails up to where they underflow.
TEST_P(DenseOps, TheErfFormOfGeluIsAccurateEverywhere) {
  std::vector<float> x = {0, -0.0f, 1e-30f, -1e-30f, 1e30f, 3e38f, -1e30f, -13.2f, -13.5f, 13.5f};
  for (float a = -14; a < 14; a += 0x1p-9f) x.push_back(a);
  const auto cols = static_cast<uint32_t>(x.size());
  const View v = inout(x);
  run({.n_rows = 1}, 1, [&](Recorder& r) { r.record(Activation{v, {.cols = cols, .act = kActGeluErf}}); });
  const std::vector<float> got = get<float>(v);
  for (size_t i = 0; i < x.size(); ++i) {
    const double a = x[i], exact = a / 2 * std::erfc(-a / std::sqrt(2));
    // Below e^-87.3, the smallest value that an exponential must give, a tail may be 0; times 14 that is
    // 2^-122.
    ASSERT_NEAR(got[i], exact, std::fabs(exact) * (a > 0 ? 24 : 20 + 2 * a * a) * 0x1p-24 + 0x1p-121) << a;
  }
}

TEST_P(DenseOps, EmbedTakesRowsOfTheTable) {
  Random random;
  for (DType type : types())
    for (uint32_t cols : depths(type)) {
      SCOPED_TRACE(::testing::Message() << dtype_info(type).name << ", " << cols << " columns");
      clear();
      const uint32_t vocab = 50;
      const Matrix table = random_matrix(random, type, vocab, cols);
      const std::vector<int32_t> tokens = {49, 0, 7, 7, 31};
      const View x = output<float>(8 * cols);
      const Embed op{
          input(padded_rows(tokens, 8)), weight(type, vocab, cols, table.bytes), x, {.cols = cols}};
      run({.n_rows = 5}, 8, [&](Recorder& r) { r.record(op); });
      const std::vector<float> got = get<float>(x);
      for (size_t r = 0; r < tokens.size(); ++r)
        for (uint32_t i = 0; i < cols; ++i)
          ASSERT_EQ(got[r * cols + i], table.values[size_t(tokens[r]) * cols + i]);
      if (GetParam() == "cpu") {
        ASSERT_TRUE(is_poison(got, 5 * cols, 3 * cols));
      }
    }
}

// Some columns of row r of a table, without tokens, scaled.
TEST_P(DenseOps, EmbedTakesColumnsOfRows) {
  Random random;
  for (DType type : types()) {
    const uint32_t block = std::max(dtype_info(type).block, 32u), cols = 2 * block, column = 3 * block;
    SCOPED_TRACE(dtype_info(type).name);
    clear();
    const uint32_t columns = 6 * block, rows = 5, max_rows = 8;
    const Matrix table = random_matrix(random, type, max_rows, columns);
    const View x = output<float>(max_rows * cols);
    const Embed op{{},
                   weight(type, max_rows, columns, table.bytes),
                   x,
                   {.cols = cols, .column = column, .scale = 0.25f}};
    run({.n_rows = rows}, max_rows, [&](Recorder& r) { r.record(op); });
    const std::vector<float> got = get<float>(x);
    for (uint32_t r = 0; r < rows; ++r)
      for (uint32_t i = 0; i < cols; ++i)
        ASSERT_EQ(got[r * cols + i], 0.25f * table.values[size_t(r) * columns + column + i]);
    if (GetParam() == "cpu") {
      ASSERT_TRUE(is_poison(got, rows * cols, (max_rows - rows) * cols));
    }
  }
}

TEST_P(DenseOps, ArgMaxGivesTiesToTheLowerIdAndRefusesNonFiniteRows) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {1,      3,      2,      3,      0,        // tie: 1
                                kNan,   -5,     -4,     -4,     -6,       // -1
                                -0.0f,  0,      0,      -1,     -1,       // -0 ties with 0: 0
                                -3e38f, -3e38f, -2e38f, -1e38f, -1e38f,   // 3
                                -1,     -1,     -kInf,  2,      9,        // -1
                                2,      kInf,   9,      -1,     kInf,     // -1
                                -1,     2,      3e38f,  9,      3.1e38f,  // 4
                                1,      2,      3,      4,      -kNan};   // -1
  const View index = output<int32_t>(10);
  const View in = input(padded_rows(x, 10 * 5));
  run({.n_rows = 8, .n_logit_rows = 8}, 10, [&](Recorder& r) { r.record(ArgMax{in, index, {.cols = 5}}); });
  std::vector<int32_t> got = get<int32_t>(index);
  got.resize(8);
  EXPECT_EQ(got, (std::vector<int32_t>{1, -1, 0, 3, -1, -1, 4, -1}));
}

// One NaN or infinity in a row, at any place, makes the row's result -1 and does not affect the rows next to
// it.
TEST_P(DenseOps, ArgMaxFindsNonFiniteNumbersAnywhere) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInf = std::numeric_limits<float>::infinity();
  Random random;
  for (const uint32_t cols : {1u, 31u, 64u, 1000u, 8192u}) {
    clear();
    const std::vector<float> others = random.floats(3 * cols);
    std::vector<int32_t> largest;
    for (uint32_t row = 0; row < 3; ++row) {
      const auto first = others.begin() + row * cols;
      largest.push_back(static_cast<int32_t>(std::max_element(first, first + cols) - first));
    }
    const View x = inout(others), index = output<int32_t>(3);
    const auto program = record(3, [&](Recorder& r) { r.record(ArgMax{x, index, {.cols = cols}}); });
    ASSERT_TRUE(program);
    for (uint32_t at = 0; at < cols; at += cols < 100 ? 1 : cols / 37)
      for (const float f : {kNan, -kNan, kInf, -kInf}) {
        std::vector<float> values = others;
        values[cols + at] = f;
        put(x, values);
        run(*program, {.n_rows = 3, .n_logit_rows = 3});
        ASSERT_EQ(get<int32_t>(index), (std::vector<int32_t>{largest[0], -1, largest[2]}))
            << f << " at " << at << " of " << cols;
      }
  }
}

TEST_P(DenseOps, ArgMaxOfALargeVocabulary) {
  model.vocab = 128256;
  constexpr uint32_t kCols = 128256;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInf = std::numeric_limits<float>::infinity();
  Random random;
  std::vector<float> x;
  std::vector<int32_t> want;
  // A row of numbers below 1, except for these values.
  const auto row = [&](int32_t winner, const std::vector<std::pair<uint32_t, float>>& values) {
    const size_t first = x.size();
    const std::vector<float> others = random.floats(kCols);
    x.insert(x.end(), others.begin(), others.end());
    for (const auto& [column, value] : values) x[first + column] = value;
    want.push_back(winner);
  };
  row(0, {{0, 2}, {kCols - 1, 2}});
  row(kCols - 1, {{kCols - 1, 2}});
  row(1023, {{1023, 2}, {1024, 2}, {1025, 2}, {65536, 2}});
  row(32, {{32, 2}, {33, 2}, {64, 2}, {128, 2}, {256, 2}, {4096, 2}, {100000, 2}});
  row(-1, {{5, kNan}, {77777, 2}});
  row(-1, {{77777, 2}, {kCols - 1, -kInf}});
  row(-1, {{64000, kInf}});
  x.insert(x.end(), kCols, 1.5f);
  want.push_back(0);
  x.insert(x.end(), kCols, kNan);
  want.push_back(-1);
  x.insert(x.end(), kCols, -3.2e38f);
  x[9 * kCols + 90001] = x[9 * kCols + 90000] = -3e38f;
  want.push_back(90000);
  const uint32_t rows = static_cast<uint32_t>(want.size());
  const View in = input(x), index = output<int32_t>(rows);
  run({.n_rows = rows, .n_logit_rows = rows}, rows, [&](Recorder& r) {
    r.record(ArgMax{in, index, {.cols = kCols}});
  });
  EXPECT_EQ(get<int32_t>(index), want);
}

TEST_P(DenseOps, LogProbIsStable) {
  model.vocab = 128256;
  Random random;
  for (uint32_t cols : {1u, 31u, 33u, 8192u, 128256u}) {
    clear();
    const uint32_t rows = 4;
    std::vector<float> x = random.floats(size_t(rows) * cols, -10, 10);
    for (uint32_t i = 0; i < cols; ++i) x[cols + i] *= 1000;  // exp overflows without the shift
    const std::vector<int32_t> target = {0, static_cast<int32_t>(cols) - 1, static_cast<int32_t>(cols / 2),
                                         static_cast<int32_t>(cols / 3)};
    const View y = output<float>(6), in = input(padded_rows(x, size_t(6) * cols)),
               at = input(padded_rows(target, 6));
    run({.n_rows = 6, .n_logit_rows = rows}, 6, [&](Recorder& r) {
      r.record(LogProb{in, at, y, {.cols = cols}});
    });
    const std::vector<float> got = get<float>(y);
    for (uint32_t r = 0; r < rows; ++r) {
      const float* row = &x[size_t(r) * cols];
      double largest = double{row[0]}, sum = 0;
      for (uint32_t i = 0; i < cols; ++i) largest = std::max(largest, double{row[i]});
      for (uint32_t i = 0; i < cols; ++i) sum += std::exp(double{row[i]} - largest);
      const double exact = double{row[target[r]]} - largest - std::log(sum);
      // Each exp is off by 2 ulp and, because of the rounded difference, by |x - max| half ulps. Up to 64
      // floats are added before they are converted to double. The logarithm turns relative into absolute
      // errors. Terms with |x - max| > 20 do not matter.
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
    r.record(Copy{src,
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
    r.record(Copy{src,
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

// Copies of several MB run next to the segment's other op, and end with the segment.
TEST_P(DenseOps, StageCopiesFromTheHostsMemory) {
  if (!device().supports(Stage{})) return;
  const uint32_t cols = 1 << 20;
  Random random;
  const std::vector<float> x = random.floats(2 * cols);
  const auto in_host = device().alloc(MemKind::kHostWeights, x.size() * sizeof(float));
  ASSERT_TRUE(in_host.ok()) << in_host.status().message();
  std::memcpy((*in_host)->mapped, x.data(), x.size() * sizeof(float));
  const View from{in_host->get(), 0, x.size() * sizeof(float)}, to = output<float>(x.size()),
                                                                y = output<float>(x.size());
  const View in = input(x);
  const uint64_t half = from.bytes / 2;
  const CopyParams p{.cols = cols, .src_stride = cols, .dst_stride = cols, .rows = kStepRows};
  run({.n_rows = 2}, 2, [&](Recorder& r) {
    r.record(Stage{from.slice(0, half), to.slice(half, half)});
    r.record(Stage{from.slice(half, half), to.slice(0, half)});
    r.record(Copy{in, y, p});
  });
  std::vector<float> expected(x.begin() + cols, x.end());
  expected.insert(expected.end(), x.begin(), x.begin() + cols);
  EXPECT_EQ(get<float>(to), expected);
  EXPECT_EQ(get<float>(y), x);
}

}  // namespace
}  // namespace thimble::test
