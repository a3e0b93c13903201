// Sums for norms, whose vectors are processed by rows of threads. Device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// The sum over all threads of a row (threadIdx.y) of the block. There is only one row if it is wider than a
// warp.
__device__ inline float row_sum(float x) {
  x = warp_sum(x);
  if (blockDim.x == kWarp) return x;
  __shared__ float sums[kWarp];
  const uint32_t lane = threadIdx.x % kWarp;
  if (lane == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  return warp_sum(lane < blockDim.x / kWarp ? sums[lane] : 0);
}

}  // namespace thimble::cuda
