// How scores and logits compare: as unsigned integers, the same on every backend. Device side.
#pragma once

#include <cstdint>

namespace thimble::cuda {

// Bits that order as numbers do: NaN lowest, with -inf; -0 as 0.
__device__ inline uint32_t order_bits(float x) {
  const uint32_t bits =
      __float_as_uint(fmaxf(x + 0.0f, -__builtin_huge_valf()));  // -0 + 0 is 0, NaN is the lesser
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// The number that has these order_bits().
__device__ inline float number_of(uint32_t order_bits) {
  return __uint_as_float(order_bits ^
                         (static_cast<uint32_t>(static_cast<int32_t>(~order_bits) >> 31) | 0x80000000u));
}

}  // namespace thimble::cuda
