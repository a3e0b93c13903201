// Tiles of a product in groups, each with rows of a single group, and the experts of a single row's slots.
// Device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// The number of tiles before those of each group, and the total at the end: starts[0, groups], in shared
// memory. One warp calls this; __syncthreads() is needed before others read.
template <uint32_t kTileRows>
__device__ inline void count_row_tiles(const uint32_t* first, uint32_t groups, uint32_t* starts) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t before = 0;
  for (uint32_t from = 0; from < groups; from += kWarp) {
    const uint32_t g = from + lane;
    uint32_t sum = g < groups ? (first[g + 1] - first[g] + kTileRows - 1) / kTileRows : 0;
#pragma unroll
    for (uint32_t offset = 1; offset < kWarp; offset *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (g < groups) starts[g + 1] = before + sum;
    before += __shfl_sync(~0u, sum, kWarp - 1);
  }
  if (lane == 0) starts[0] = 0;
}

// The group of tile i, or of row i if `starts` counts rows.
__device__ inline uint32_t group_of_tile(const uint32_t* starts, uint32_t groups, uint32_t i) {
  uint32_t low = 0, high = groups - 1;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (starts[middle + 1] > i)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// The expert of a slot of a single row: the number of experts whose slots end before it. Whole warps call
// this.
__device__ inline uint32_t expert_of(const uint32_t* first, uint32_t experts, uint32_t slot) {
  uint32_t before = 0;
  for (uint32_t from = 0; from < experts; from += kWarp) {
    const uint32_t e = from + threadIdx.x % kWarp;
    before += __popc(__ballot_sync(~0u, e < experts && first[e + 1] <= slot));
  }
  return before;
}

// Lane s gets the expert of slot s of a single row, which has one slot per chosen expert, at most 32.
__device__ inline uint32_t experts_of_slots(const uint32_t* first, uint32_t experts) {
  constexpr uint32_t kEach = 4;  // experts that a lane loads at once
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t expert = 0;
  for (uint32_t from = 0; from < experts; from += kEach * kWarp) {
    uint32_t slot[kEach], behind[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t e = min(from + i * kWarp + lane, experts);
      slot[i] = first[e];
      behind[i] = first[min(e + 1, experts)];
    }
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i)
      for (uint32_t chosen = __ballot_sync(~0u, slot[i] < behind[i]); chosen; chosen &= chosen - 1) {
        const uint32_t owner = __ffs(chosen) - 1;
        if (lane == __shfl_sync(~0u, slot[i], owner)) expert = from + i * kWarp + owner;
      }
  }
  return expert;
}

}  // namespace thimble::cuda
