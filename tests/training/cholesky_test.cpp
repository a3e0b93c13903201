// Tests factors of matrices that were made from known factors.
#include "training/cholesky.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "tests/support/random.h"

namespace thimble::test {
namespace {

// A lower triangle with a diagonal of 1 to 2. All other elements are so small that rounding errors do not
// grow.
std::vector<double> some_factor(uint32_t n) {
  Random random{n};
  std::vector<double> factor(size_t(n) * n);
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t j = 0; j <= i; ++j)
      factor[size_t(i) * n + j] =
          i == j ? double{random.uniform(1, 2)} : double{random.uniform(-1, 1)} / std::sqrt(double(n));
  return factor;
}

// The product factor factor', on and below the diagonal; the values above it must not matter.
std::vector<double> squared(const std::vector<double>& factor, uint32_t n) {
  std::vector<double> a(factor.size(), NAN);
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t j = 0; j <= i; ++j)
      a[size_t(i) * n + j] = std::inner_product(&factor[size_t(i) * n], &factor[size_t(i) * n] + j + 1,
                                                &factor[size_t(j) * n], 0.0);
  return a;
}

constexpr uint32_t kSizes[] = {1, 3, 63, 64, 65, 66, 128, 131, 300};  // panels have 64 columns

// Sums of n products of about 1 are off by n 2^-53 or less. Solutions are off by this times the condition
// number, which is below 100 here.
TEST(Cholesky, FindsTheFactorAndSolves) {
  for (const uint32_t n : kSizes) {
    SCOPED_TRACE(n);
    const std::vector<double> expected = some_factor(n);
    const double tolerance = n * 0x1p-53 * 100;
    std::vector<double> found[2];
    for (const uint32_t count : {1u, 3u}) {
      ThreadPool threads(count);
      std::vector<double>& a = found[count / 3];
      a = squared(expected, n);
      ASSERT_TRUE(factorise(a, n, threads));
      for (uint32_t i = 0; i < n; ++i)
        for (uint32_t j = 0; j <= i; ++j)
          ASSERT_NEAR(a[size_t(i) * n + j], expected[size_t(i) * n + j], tolerance) << i << ", " << j;
    }
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t j = 0; j <= i; ++j)
        ASSERT_EQ(found[0][size_t(i) * n + j], found[1][size_t(i) * n + j]) << i << ", " << j;

    Random random{5};
    const std::vector<float> x = random.floats(n);
    std::vector<double> b(n);
    const std::vector<double> a = squared(expected, n);
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t j = 0; j < n; ++j) b[i] += a[size_t(std::max(i, j)) * n + std::min(i, j)] * double{x[j]};
    solve(found[0], n, b.data());
    for (uint32_t i = 0; i < n; ++i) ASSERT_NEAR(b[i], x[i], tolerance) << i;
  }
}

// A diagonal element of a positive definite matrix is positive.
TEST(Cholesky, IsRefusedIfTheMatrixIsNotPositive) {
  ThreadPool threads(2);
  for (const uint32_t n : {1u, 70u, 200u})
    for (const uint32_t at : {0u, n / 2, n - 1}) {
      const std::vector<double> a = squared(some_factor(n), n);
      for (const double bad : {-1e-3, 0.0, double(NAN)}) {
        std::vector<double> copy = a;
        copy[size_t(at) * n + at] = bad;
        EXPECT_FALSE(factorise(copy, n, threads)) << n << ", " << at;
      }
    }
}

}  // namespace
}  // namespace thimble::test
