// The types whose nibbles name values: iq4_nl, iq4_xs, mxfp4. Device side.
#pragma once

#include "backends/codebooks.h"
#include "backends/cuda/kernel.cuh"
#include "base/dtype.h"

namespace thimble::cuda {

// Four values of a code, from `first` on, as signed bytes of a word.
template <DType type>
__device__ constexpr uint32_t four_values(uint32_t first) {
  constexpr int8_t kIq4[] = {THIMBLE_IQ4_VALUES}, kFp4[] = {THIMBLE_FP4_VALUES};
  uint32_t word = 0;
  for (uint32_t i = 0; i < 4; ++i)
    word |= uint32_t(uint8_t((type == DType::kMXFP4 ? kFp4 : kIq4)[first + i])) << 8 * i;
  return word;
}

// What four nibbles, a byte each, stand for: signed bytes. A permutation of bytes chooses among eight.
template <DType type>
__device__ inline uint32_t code_bytes(uint32_t nibbles) {
  constexpr uint32_t kValues[] = {four_values<type>(0), four_values<type>(4), four_values<type>(8),
                                  four_values<type>(12)};
  const uint32_t places = __byte_perm(nibbles | nibbles >> 4, 0, 0x4420) & 0x7777;
  const uint32_t low = __byte_perm(kValues[0], kValues[1], places),
                 high = __byte_perm(kValues[2], kValues[3], places);
  const uint32_t from_high = (nibbles >> 3 & 0x01010101) * 255;
  return (low & ~from_high) | (high & from_high);
}

// The scale of an mxfp4 block, 2^(x - 128); of 0 and 1 it is subnormal.
__device__ inline float power_of_two(uint32_t x) {
  return __uint_as_float(x < 2 ? 0x00200000 << x : (x - 1) << 23);
}

}  // namespace thimble::cuda
