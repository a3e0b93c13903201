// The order of scores and logits, as unsigned integers. C++, CUDA and GLSL share this header.
#ifndef THIMBLE_ORDER_BITS_H
#define THIMBLE_ORDER_BITS_H

#if defined(__CUDACC__)
#define THIMBLE_FUNCTION __host__ __device__ inline
#elif defined(__cplusplus)
#define THIMBLE_FUNCTION inline
#else
#define THIMBLE_FUNCTION
#endif

#ifdef __cplusplus
#include "backends/op_params.h"
namespace thimble {
#endif

// Maps the bits of a float to an unsigned integer with the same order. NaN equals -inf, the lowest, and -0
// equals 0.
THIMBLE_FUNCTION uint order_bits(uint bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0xff800000u;  // NaN
  if (bits == 0x80000000u) bits = 0u;                          // -0
  return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

#undef THIMBLE_FUNCTION

#ifdef __cplusplus
}  // namespace thimble
#endif

#endif
