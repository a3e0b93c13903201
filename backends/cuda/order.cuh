// Maps scores and logits to unsigned integers that compare in the same order. Device side.
#pragma once

#include "backends/order_bits.h"

namespace thimble::cuda {

__device__ inline uint32_t order_bits(float x) { return thimble::order_bits(__float_as_uint(x)); }

// The number with these order_bits().
__device__ inline float number_of(uint32_t order_bits) {
  return __uint_as_float(order_bits ^
                         (static_cast<uint32_t>(static_cast<int32_t>(~order_bits) >> 31) | 0x80000000u));
}

}  // namespace thimble::cuda
