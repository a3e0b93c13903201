// The types whose nibbles index a table of values: iq4_nl, iq4_xs, mxfp4, nvfp4. Device side.
#pragma once

#include "backends/codebooks.h"
#include "backends/cuda/kernel.cuh"
#include "base/dtype.h"

namespace thimble::cuda {

// Four values of the table from `first` on, multiplied by `times`, as signed bytes of a word.
template <DType type>
__device__ constexpr uint32_t four_values(uint32_t first, int times = 1) {
  constexpr int8_t kIq4[] = {THIMBLE_IQ4_VALUES}, kFp4[] = {THIMBLE_FP4_VALUES};
  constexpr bool kIsFp4 = type == DType::kMXFP4 || type == DType::kNVFP4;
  uint32_t word = 0;
  for (uint32_t i = 0; i < 4; ++i)
    word |= uint32_t(uint8_t(times * (kIsFp4 ? kFp4 : kIq4)[first + i])) << 8 * i;
  return word;
}

// Picks bytes of a and b by the low three bits of a selector's four nibbles. If a nibble's fourth bit is set,
// the result is the byte's sign in all bits. (__byte_perm() takes an extra instruction to clear the fourth
// bits.)
__device__ inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(selector));
  return word;
}

// The values of the four nibbles in a word's low half, as signed bytes. One byte permutation picks among
// eight values by the low three bits of a nibble; another one picks between its results by the fourth bit.
template <DType type>
__device__ inline uint32_t four_codes(uint32_t low_three, uint32_t fourth) {
  constexpr uint32_t kValues[] = {four_values<type>(0), four_values<type>(4), four_values<type>(8),
                                  four_values<type>(12)};
  return permuted(permuted(kValues[0], kValues[1], low_three), permuted(kValues[2], kValues[3], low_three),
                  fourth);
}
// The values of eight nibbles, two bytes' nibbles per word: for each byte the low one, then the high one.
template <DType type>
__device__ inline uint2 pairs_of_codes(uint32_t nibbles) {
  const uint32_t low_three = nibbles & 0x77777777, fourth = (nibbles >> 1 & 0x44444444) | 0x32103210;
  return {four_codes<type>(low_three, fourth), four_codes<type>(low_three >> 16, fourth >> 16)};
}
// The same for mxfp4, as two addends, which takes fewer instructions because the fourth bit is a sign. One
// addend is twice the magnitude, or 0 if the sign is set; the other is minus the magnitude.
struct PairsOfAddends {
  uint2 twice, minus;
};
__device__ inline PairsOfAddends addends_of_fp4(uint32_t nibbles) {
  constexpr uint32_t kTwice[] = {four_values<DType::kMXFP4>(0, 2), four_values<DType::kMXFP4>(4, 2)},
                     kMinus[] = {four_values<DType::kMXFP4>(0, -1), four_values<DType::kMXFP4>(4, -1)};
  const uint32_t magnitudes = nibbles & 0x77777777;
  return {{permuted(kTwice[0], kTwice[1], nibbles), permuted(kTwice[0], kTwice[1], nibbles >> 16)},
          {permuted(kMinus[0], kMinus[1], magnitudes), permuted(kMinus[0], kMinus[1], magnitudes >> 16)}};
}
// The values of the low nibbles of four bytes, and those of the high nibbles.
template <DType type>
__device__ inline uint2 code_bytes(uint32_t nibbles) {
  const uint2 pairs = pairs_of_codes<type>(nibbles);
  return {__byte_perm(pairs.x, pairs.y, 0x6420), __byte_perm(pairs.x, pairs.y, 0x7531)};
}

// The scale of an mxfp4 block, 2^(x - 128); it is subnormal for an x of 0 and 1.
__device__ inline float power_of_two(uint32_t x) {
  return __uint_as_float(x < 2 ? 0x00200000 << x : (x - 1) << 23);
}

// Half of nvfp4's scale of 16 elements, a number of 8 bits: no sign, 4 bits of exponent, 3 of mantissa. NaN
// is read as 0.
__device__ inline float half_of_e4m3(uint32_t bits) {
  if (bits == 0x7f) return 0;
  const uint32_t exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 0) return float(mantissa) * 0x1p-10f;
  return float(8 + mantissa) * __uint_as_float(exponent + (127 - 11) << 23);
}

}  // namespace thimble::cuda
