// The inner loops of every instruction set that this processor supports; the op tests run only the fastest.
#include "backends/cpu/kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "backends/op_params.h"
#include "tests/ops/op_test.h"

namespace thimble::cpu {
namespace {

using test::Random;

class KernelSets : public ::testing::Test {
 protected:
  void SetUp() override {
    const Kernels* found[4];
    const uint32_t n = kernel_sets(found);
    sets.assign(found, found + n);
  }
  std::vector<const Kernels*> sets;
};

TEST_F(KernelSets, MultiplyPackedPanels) {
  Random random;
  for (const Kernels* k : sets)
    for (uint32_t n : {1u, 7u, 256u, 300u})
      for (uint32_t cols : {1u, k->panel_cols - 1, k->panel_cols, 2 * k->panel_cols + 3})
        for (uint32_t rows = 1; rows <= 27; ++rows) {
          const std::vector<float> w = random.floats(size_t(cols) * n),
                                   x = random.floats(size_t(rows) * (n + 3));
          const uint32_t panels = (cols + k->panel_cols - 1) / k->panel_cols;
          std::vector<float> packed(size_t(panels) * k->panel_cols * n, 99.0f);
          for (uint32_t c = 0; c < cols; c += k->panel_cols)
            k->pack(DType::kF32, reinterpret_cast<const std::byte*>(&w[size_t(c) * n]), n * 4,
                    std::min(k->panel_cols, cols - c), n, &packed[size_t(c) * n]);
          std::vector<float> y(size_t(rows) * (cols + 1), 5.0f);
          const bool accumulate = rows % 2 == 0;
          k->multiply(x.data(), n + 3, rows, packed.data(), n, cols, y.data(), cols + 1, accumulate);
          for (uint32_t r = 0; r < rows; ++r) {
            for (uint32_t c = 0; c < cols; ++c) {
              double sum = accumulate ? 5 : 0, magnitude = sum;
              for (uint32_t i = 0; i < n; ++i) {
                const double product = double{w[size_t(c) * n + i]} * double{x[size_t(r) * (n + 3) + i]};
                sum += product;
                magnitude += std::fabs(product);
              }
              // n products and n + 1 additions, each off by at most half an ulp of the sum of magnitudes.
              ASSERT_NEAR(y[size_t(r) * (cols + 1) + c], sum, (2 * n + 1) * 0x1p-24 * magnitude)
                  << k->name << ", " << rows << " rows, " << cols << " columns of " << n << ", at " << r
                  << ", " << c;
            }
            ASSERT_EQ(y[size_t(r) * (cols + 1) + cols], 5.0f) << k->name << " wrote past a row";
          }
        }
}

TEST_F(KernelSets, ComputeExpWithinAnUlpAndAQuarter) {
  for (const Kernels* k : sets) {
    double worst = 0;
    for (uint64_t bits = 0; bits < 0x100000000u; bits += 4099) {
      const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
      if (!(x >= -87.3365f && x <= 88.7228f)) continue;
      const double exact = std::exp(double{x});
      const float nearest = static_cast<float>(exact);
      const double ulp = std::nextafter(nearest, std::numeric_limits<float>::infinity()) - nearest;
      worst = std::max(worst, std::fabs(k->sum_exp(&x, 1, 0) - exact) / ulp);
    }
    EXPECT_LT(worst, 1.25) << k->name;  // 1.06 measured over every 61st float
    const float inf = std::numeric_limits<float>::infinity();
    for (auto [x, y] : {std::pair{-1000.0f, 0.0f}, {-inf, 0.0f}, {0.0f, 1.0f}, {89.0f, inf}, {inf, inf}})
      EXPECT_EQ(k->sum_exp(&x, 1, 0), y) << k->name << ", exp of " << x;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(k->sum_exp(&nan, 1, 0))) << k->name;
  }
}

TEST_F(KernelSets, ActivateAndScale) {
  Random random;
  for (const Kernels* k : sets)
    for (uint32_t act : {kActSilu, kActGelu, kActGeluErf})
      for (uint32_t n : {1u, 3u, 4u, 15u, 16u, 17u, 1000u}) {
        const std::vector<float> x = random.floats(n, -20, 20), factor = random.floats(n);
        std::vector<float> plain = x, scaled = x;
        plain.push_back(7);
        scaled.push_back(7);
        k->activate(act, plain.data(), nullptr, n);
        k->activate(act, scaled.data(), factor.data(), n);
        EXPECT_EQ(plain[n], 7.0f);
        EXPECT_EQ(scaled[n], 7.0f);
        for (uint32_t i = 0; i < n; ++i) {
          const double v = double{x[i]},
                       u2 = 2 * std::sqrt(2 / 3.14159265358979) * (v + 0.044715 * v * v * v);
          const double y = act == kActGeluErf ? v / 2 * std::erfc(-v / std::sqrt(2))
                                              : v / (1 + std::exp(act == kActSilu ? -v : -u2));
          // exp, sum and quotient: at most 4 half ulps. The argument of gelu has 4 roundings, which exp
          // multiplies by the argument. The argument of erfc has 2, which become v^2 + 1 of the result; erfc
          // itself is within 4 ulp.
          const double half_ulps = act == kActSilu   ? 6
                                   : act == kActGelu ? 6 + 4 * std::fabs(u2)
                                                     : 12 + 2 * v * v;
          const double tolerance = std::fabs(y) * 0x1p-24 * half_ulps + 1e-37;
          ASSERT_NEAR(plain[i], y, tolerance) << k->name << ", act " << act << " of " << v;
          ASSERT_NEAR(scaled[i], y * double{factor[i]}, tolerance)
              << k->name << ", act " << act << " of " << v;
        }
      }
}

TEST_F(KernelSets, NormaliseRows) {
  Random random;
  for (const Kernels* k : sets)
    for (uint32_t n : {1u, 31u, 33u, 64u, 1000u}) {
      const std::vector<float> x = random.floats(n, -1e5f, 1e5f), w = random.floats(n);
      std::vector<float> y = x;
      k->rms_norm(y.data(), w.data(), n, 1e-5f, false, false, y.data());
      double squares = 0;
      for (float f : x) squares += double{f} * double{f};
      const double scale = 1 / std::sqrt(squares / n + 1e-5);
      for (uint32_t i = 0; i < n; ++i) {
        const double exact = double{x[i]} * scale * double{w[i]};
        // The sum of squares is off by at most n half ulps, which the root halves; six more operations
        // follow.
        ASSERT_NEAR(y[i], exact, std::fabs(exact) * (n / 2.0 + 7) * 0x1p-24) << k->name << ", n " << n;
      }
    }
}

}  // namespace
}  // namespace thimble::cpu
