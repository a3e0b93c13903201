// The functions of activation and glu, each as exact as it needs to be. Device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// Both activations are x * sigmoid(s). For silu s is x; gelu's 0.5 x (1 + tanh u) is x * sigmoid(2 u).
__device__ inline float sigmoid_argument(float x, uint32_t act) {
  return act == kActSilu ? x : 1.59576912f * x * (1.0f + 0.044715f * x * x);  // 2 sqrt(2 / pi)
}

// max(gate, 0) * up; NaN passes through.
__device__ inline float relu_of(float gate, float up) { return gate < 0 ? 0 : gate * up; }

// The glu of gpt-oss.
__device__ inline float clamped_glu(float gate, float up) {
  gate = fminf(gate, 7.0f);
  return gate / (1 + expf(-1.702f * gate)) * (fminf(fmaxf(up, -7.0f), 7.0f) + 1);
}

// For activation. glu of many rows is less exact (dense.h).
__device__ inline float activated(float x, uint32_t act) {
  return x / (1.0f + expf(-sigmoid_argument(x, act)));
}

// For glu of few rows.
__device__ inline float glu_of(float gate, float up, uint32_t act) {
  if (act == kActReluSqr) return relu_of(gate, up);
  return act == kActClamped ? clamped_glu(gate, up) : activated(gate, act) * up;
}

}  // namespace thimble::cuda
