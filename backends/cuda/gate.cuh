// The activations of gates, as exact as f32 allows: the states of recurrent layers remember what they let
// through. Device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }

__device__ inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

}  // namespace thimble::cuda
