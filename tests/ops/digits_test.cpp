// Products with digits of x (backends/cpu/digits.h), for each instruction set that this processor supports.
#include "backends/cpu/digits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/bits.h"
#include "tests/ops/random_matrix.h"

namespace thimble::cpu {
namespace {

using test::Matrix;
using test::Random;

constexpr DType kTypes[] = {
#define X(name, number, block, bytes) DType::k##name,
    THIMBLE_DTYPES(X)
#undef X
};

// Calls body(set, type, the float kernels with vectors of the same length) for all combinations.
template <typename Body>
void for_all(const Body& body) {
  const DigitKernels* sets[4];
  const Kernels* of_floats[4];
  const uint32_t n = digit_kernel_sets(sets), n_floats = kernel_sets(of_floats);
  for (uint32_t i = 0; i < n; ++i)
    for (DType type : kTypes)
      if (sets[i]->knows(type)) {
        SCOPED_TRACE(::testing::Message() << dtype_info(type).name << ", " << sets[i]->name);
        const bool short_vectors = std::strcmp(sets[i]->name, "avxvnni") == 0;
        body(*sets[i], type, *of_floats[std::min(i, short_vectors ? 1 : n_floats - 1)]);
        if (::testing::Test::HasFatalFailure()) return;
      }
}

// Rows of x and their digits.
struct Digits {
  Digits(const DigitKernels& kernels, const std::vector<float>& x, uint32_t n)
      : stride(digit_blocks(n)), blocks(x.size() / n * stride) {
    for (size_t row = 0; row < x.size() / n; ++row) kernels.take(&x[row * n], n, &blocks[row * stride]);
  }
  size_t stride;
  std::vector<DigitBlock> blocks;
};

struct Expected {
  double sum, bound;
};
// A row of W times a row of x, and the error bound of a dot product with digits.
Expected expected_of(DType type, const std::byte* blocks, const float* w, const float* x, uint32_t n) {
  const DTypeInfo& info = dtype_info(type);
  const std::vector<size_t> halves = test::halves_of(type);
  const double most = type == DType::kQ4_1 ? 1 : type == DType::kQ2_K ? 15 : 63;
  Expected e{0, 0};
  double magnitude = 0;
  for (uint32_t group = 0; group < n; group += 32) {
    double minimum = 0, largest = 0, weights = 0;
    if (halves.size() > 1) {
      uint16_t m;
      std::memcpy(&m, blocks + group / info.block * info.block_bytes + halves[1], sizeof m);
      minimum = most * std::fabs(double{f16_to_f32(m)});
    }
    for (uint32_t i = group; i < group + 32; ++i) {
      e.sum += double{w[i]} * double{x[i]};
      largest = std::max(largest, std::fabs(double{x[i]}));
      weights += std::fabs(double{w[i]}) + minimum;
      // The element and its minimum are multiplied separately, as integers.
      magnitude += (std::fabs(double{w[i]}) + 2 * minimum) * std::fabs(double{x[i]});
    }
    e.bound += 1.01 * 0x1p-23 * largest * weights;  // half a unit of each number
  }
  // Sums of at least four products are rounded to floats in two steps, multiplied by their scale and added
  // one by one to at most 32 sums, which are then added. Sums of 32 numbers for minima have as many
  // roundings. W itself, as floats, is off by an ulp.
  e.bound += (n / 4 + 2 + 32 + 32 + 2) * 0x1p-24 * magnitude;
  return e;
}

std::vector<float> normal(Random& random, size_t n) {
  std::vector<float> v(n);
  for (float& f : v)
    for (int i = 0; i < 12; ++i) f += random.uniform(-1, 1) / 2;
  return v;
}

TEST(DigitDots, AreWithinTheirBound) {
  for_all([](const DigitKernels& set, DType type, const Kernels&) {
    Random random;
    const uint32_t block = dtype_info(type).block;
    for (uint32_t n : {block, 3 * block, 17 * block, 2048u})
      for (float scale : {1.0f, 1e-25f, 1e25f}) {
        const Matrix w = test::random_matrix(random, type, 5, n);
        std::vector<float> x = normal(random, size_t{kMaxDotRows} * n);
        for (size_t i = 0; i < x.size(); ++i) x[i] *= i % 97 ? scale : 1000 * scale;
        const Digits digits(set, x, n);
        for (uint32_t c = 0; c < 5; ++c) {
          const std::byte* row = &w.bytes[dtype_bytes(type, uint64_t{c} * n)];
          float together[kMaxDotRows], alone;
          set.dot(type, row, n, digits.blocks.data(), digits.stride, kMaxDotRows, together);
          for (uint32_t r = 0; r < kMaxDotRows; ++r) {
            const Expected e = expected_of(type, row, &w.values[size_t{c} * n], &x[size_t{r} * n], n);
            ASSERT_NEAR(together[r], e.sum, e.bound) << "row " << r << " of " << n;
            set.dot(type, row, n, &digits.blocks[r * digits.stride], digits.stride, 1, &alone);
            ASSERT_EQ(together[r], alone) << "row " << r << " of " << n << " depends on others";
          }
        }
        const size_t row_bytes = dtype_bytes(type, n);
        for (uint32_t rows = 1; rows <= set.stream_rows; ++rows) {
          float streams[kMaxStreams * kMaxStreamRows], alone;
          set.dot_streams(type, w.bytes.data(), row_bytes, n, digits.blocks.data(), digits.stride, rows,
                          streams);
          for (uint32_t c = 0; c < set.streams; ++c)
            for (uint32_t r = 0; r < rows; ++r) {
              set.dot(type, &w.bytes[c * row_bytes], n, &digits.blocks[r * digits.stride], digits.stride, 1,
                      &alone);
              ASSERT_EQ(streams[c * rows + r], alone)
                  << "row " << c << " of W, of " << n << ", times row " << r << " depends on others";
            }
        }
      }
  });
}

// The largest possible sums of integers: all numbers of a block are equal, with the largest digits.
TEST(DigitDots, DoNotOverflow) {
  constexpr uint32_t n = 512;
  for_all([](const DigitKernels& set, DType type, const Kernels&) {
    for (int fill : {0x00, 0x07, 0x70, 0x77, 0x7f, 0x80, 0x88, 0xf0, 0x0f, 0xff})
      for (float largest : {127.0f * (1 + 256 + 65536), 0x1p22f}) {
        Matrix w{std::vector<std::byte>(dtype_bytes(type, n), static_cast<std::byte>(fill)),
                 std::vector<float>(n)};
        for (size_t at = 0; at < w.bytes.size(); at += dtype_info(type).block_bytes) {
          for (size_t half : test::halves_of(type)) test::put_half(&w.bytes[at + half], 1);
          if (type == DType::kMXFP4) w.bytes[at] = std::byte{128};
          if (type == DType::kNVFP4) std::fill_n(&w.bytes[at], 4, std::byte{0x40});  // 2
        }
        test::read_values(w, type, 1, n);
        for (int sign : {1, -1}) {
          std::vector<float> x(n);
          for (uint32_t i = 0; i < n; ++i)
            x[i] = sign > 0 || w.values[i] > 0 ? largest : -largest;  // the second term adds magnitudes
          const Digits digits(set, x, n);
          float got;
          set.dot(type, w.bytes.data(), n, digits.blocks.data(), digits.stride, 1, &got);
          const Expected e = expected_of(type, w.bytes.data(), w.values.data(), x.data(), n);
          ASSERT_NEAR(got, e.sum, e.bound) << "blocks of " << fill << " times " << sign * largest;
        }
      }
  });
}

// The root mean square error of many rows, compared with dot products of floats. The error of digits grows
// with the root of n, as does half a unit per number: 0.29 units of at most 2^-22 of the largest of 32
// numbers, which is twice their average. The error of floats grows with n, because each of n roundings is of
// a growing sum. Digits are thus worse in short rows and better in long ones.
TEST(DigitDots, AreAsExactAsFloats) {
  constexpr uint32_t rows = 400;
  for_all([](const DigitKernels& set, DType type, const Kernels& of_floats) {
    Random random;
    for (auto [n, most] : {std::pair{1024u, 1.6}, {2048u, 1.5}, {4096u, 1.0}, {8192u, 0.9}}) {
      const Matrix w = test::random_matrix(random, type, rows, n);
      const std::vector<float> x = normal(random, n);
      const Digits digits(set, x, n);
      double squares = 0, squares_of_floats = 0;
      for (uint32_t r = 0; r < rows; ++r) {
        const std::byte* row = &w.bytes[dtype_bytes(type, uint64_t{r} * n)];
        double sum = 0;
        for (uint32_t i = 0; i < n; ++i) sum += double{w.values[size_t{r} * n + i]} * double{x[i]};
        float got;
        set.dot(type, row, n, digits.blocks.data(), digits.stride, 1, &got);
        squares += (double{got} - sum) * (double{got} - sum);
        of_floats.dot(type, row, n, x.data(), n, 1, &got);
        squares_of_floats += (double{got} - sum) * (double{got} - sum);
      }
      EXPECT_LE(std::sqrt(squares / squares_of_floats), most) << "rows of " << n;
    }
  });
}

TEST(DigitDots, OfNonFiniteNumbersAreNotFinite) {
  constexpr uint32_t n = 512;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for_all([](const DigitKernels& set, DType type, const Kernels&) {
    Random random;
    const Matrix w = test::random_matrix(random, type, 1, n);
    for (float special : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      std::vector<float> x = random.floats(2 * n);
      x[n + 300] = special;
      const Digits digits(set, x, n);
      float got[2];
      set.dot(type, w.bytes.data(), n, digits.blocks.data(), digits.stride, 2, got);
      EXPECT_TRUE(std::isfinite(got[0]));
      EXPECT_FALSE(std::isfinite(got[1])) << special;
    }
  });
}

}  // namespace
}  // namespace thimble::cpu
