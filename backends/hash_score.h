// The score of random retention. C++, CUDA and GLSL share this header, so every backend computes the same
// bits.
#ifndef THIMBLE_HASH_SCORE_H
#define THIMBLE_HASH_SCORE_H

#if defined(__CUDACC__)
#define THIMBLE_FUNCTION __device__ inline
#elif defined(__cplusplus)
#define THIMBLE_FUNCTION inline
#else
#define THIMBLE_FUNCTION
#endif

#ifdef __cplusplus
#include "backends/op_params.h"
namespace thimble {
#endif

// A permutation of the 32-bit numbers. Each input bit changes each output bit about half of the time.
THIMBLE_FUNCTION uint mix_bits(uint x) {
  x += 0x9e3779b9u;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Uniform in [0, 1), a multiple of 2^-24.
THIMBLE_FUNCTION float hash_score(uint seed, uint layer, uint head, uint position) {
  const uint bits = mix_bits(mix_bits(mix_bits(mix_bits(seed) ^ layer) ^ head) ^ position);
  return float(bits >> 8) * (1.0f / 16777216.0f);
}

#undef THIMBLE_FUNCTION

#ifdef __cplusplus
}  // namespace thimble
#endif

#endif
