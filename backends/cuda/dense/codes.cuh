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

// What the four nibbles in a word's low half stand for: signed bytes. A permutation of bytes chooses among
// eight by the low three bits of a nibble; another one, by the fourth, among its results.
template <DType type>
__device__ inline uint32_t four_codes(uint32_t low_three, uint32_t fourth) {
  constexpr uint32_t kValues[] = {four_values<type>(0), four_values<type>(4), four_values<type>(8),
                                  four_values<type>(12)};
  return __byte_perm(__byte_perm(kValues[0], kValues[1], low_three),
                     __byte_perm(kValues[2], kValues[3], low_three), fourth);
}
// What eight nibbles stand for, two bytes' to a word: a byte's low one, then its high one.
template <DType type>
__device__ inline uint2 pairs_of_codes(uint32_t nibbles) {
  const uint32_t low_three = nibbles & 0x77777777, fourth = (nibbles >> 1 & 0x44444444) | 0x32103210;
  return {four_codes<type>(low_three, fourth), four_codes<type>(low_three >> 16, fourth >> 16)};
}
// What the low nibbles of four bytes stand for, and what the high ones do.
template <DType type>
__device__ inline uint2 code_bytes(uint32_t nibbles) {
  const uint2 pairs = pairs_of_codes<type>(nibbles);
  return {__byte_perm(pairs.x, pairs.y, 0x6420), __byte_perm(pairs.x, pairs.y, 0x7531)};
}

// The scale of an mxfp4 block, 2^(x - 128); of 0 and 1 it is subnormal.
__device__ inline float power_of_two(uint32_t x) {
  return __uint_as_float(x < 2 ? 0x00200000 << x : (x - 1) << 23);
}

}  // namespace thimble::cuda
