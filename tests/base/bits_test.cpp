// Rounding up and 16-bit floats.
#include "base/bits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace thimble {
namespace {

TEST(Bits, RoundsUpToMultiples) {
  EXPECT_EQ(round_up(0, 32), 0u);
  EXPECT_EQ(round_up(1, 32), 32u);
  EXPECT_EQ(round_up(32, 32), 32u);
  EXPECT_EQ(round_up(33, 32), 64u);
  EXPECT_EQ(ceil_div(0, 64), 0u);
  EXPECT_EQ(ceil_div(64, 64), 1u);
  EXPECT_EQ(ceil_div(65, 64), 2u);
}

// The value of a half by definition.
double half_value(uint16_t h) {
  const double sign = h & 0x8000 ? -1 : 1;
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

TEST(Bits, ReadsEveryHalfExactlyAndWritesItBack) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const uint16_t half = static_cast<uint16_t>(h);
    const float f = f16_to_f32(half);
    if (std::isnan(half_value(half))) {
      ASSERT_TRUE(std::isnan(f)) << h;
      ASSERT_TRUE(std::isnan(f16_to_f32(f32_to_f16(f)))) << h;
    } else {
      ASSERT_EQ(f, half_value(half)) << h;
      ASSERT_EQ(f32_to_f16(f), half) << h;
    }
  }
}

TEST(Bits, RoundsToTheNearestHalfAndTiesToEven) {
  for (uint16_t h = 0; h < 0x7bff; ++h) {  // every pair of neighbours among the finite positive halves
    const double low = half_value(h), high = half_value(static_cast<uint16_t>(h + 1)),
                 middle = (low + high) / 2;
    const float tie = static_cast<float>(middle);
    ASSERT_EQ(tie, middle);  // a float holds a half's mantissa plus one bit
    const uint16_t even = h % 2 == 0 ? h : static_cast<uint16_t>(h + 1);
    ASSERT_EQ(f32_to_f16(tie), even) << h;
    ASSERT_EQ(f32_to_f16(std::nextafter(tie, 0.0f)), h) << h;
    ASSERT_EQ(f32_to_f16(std::nextafter(tie, INFINITY)), h + 1) << h;
    ASSERT_EQ(f32_to_f16(-tie), even | 0x8000) << h;
  }
}

TEST(Bits, OverflowsHalvesToInfinity) {
  EXPECT_EQ(f32_to_f16(65504.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);  // halfway to 65536
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::max()), 0x7c00);
  EXPECT_EQ(f32_to_f16(-INFINITY), 0xfc00);
}

TEST(Bits, ReadsBf16AsTheUpperHalfOfAFloat) {
  EXPECT_EQ(bf16_to_f32(0x3f80), 1.0f);
  EXPECT_EQ(bf16_to_f32(0xc2f7), -123.5f);
  EXPECT_TRUE(std::isinf(bf16_to_f32(0x7f80)));
}

}  // namespace
}  // namespace thimble
