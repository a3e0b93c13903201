// The soft cap of logits. Device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// cap tanh(x / cap) with an error of up to 2^-23 of the cap.
__device__ inline float soft_cap(float x, float cap) {
  const float e = __expf(-2 / cap * fabsf(x));
  return copysignf(cap * ((1 - e) / (1 + e)), x);
}

}  // namespace thimble::cuda
