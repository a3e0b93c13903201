// Gaps in a run: its entries move up, so that others get their places among them. Device side.
#pragma once

#include "backends/cuda/kv/slices.cuh"

namespace thimble::cuda {

inline constexpr uint32_t kGapThreads = 256;

// The gaps between the first `end` entries of a run. Gap j comes after before[j] of them.
struct Gaps {
  uint32_t end, count;
  const uint32_t* before;  // ascending

  // The new index of entry i: it goes after the gaps that precede it.
  __device__ uint32_t place_of(uint32_t i) const {
    uint32_t low = 0, high = count;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (before[middle] <= i)
        low = middle + 1;
      else
        high = middle;
    }
    return i + low;
  }
};

// Opens the gaps, at least one, in kWidth units of every row of one column. Rows have `stride` units; this
// block moves those from `first` on.
//
// The last entries move first, tile by tile. None moves to below its tile, so a tile may be written once it
// was read.
template <uint32_t kWidth, typename Unit>
__device__ void open_gaps(const Gaps& gaps, Unit* run, uint32_t stride, uint32_t first) {
  constexpr uint32_t kLoads = 4;  // rows per thread in flight at once
  constexpr uint32_t kRows = kGapThreads / kWidth, kTile = kLoads * kRows;
  const uint32_t column = first + threadIdx.x % kWidth, row = threadIdx.x / kWidth;
  const bool has_column = column < stride;
  const auto at = [&](uint32_t i) -> Unit& { return run[uint64_t(i) * stride + column]; };
  const uint32_t in_place = gaps.before[0];
  for (uint32_t end = gaps.end, begin; end > in_place; end = begin) {
    begin = end - min(end - in_place, kTile);
    Unit loaded[kLoads] = {};
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j)
      if (const uint32_t i = begin + row + j * kRows; i < end && has_column) loaded[j] = at(i);
    __syncthreads();  // this tile has been read, and what the block read before
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j)
      if (const uint32_t i = begin + row + j * kRows; i < end && has_column) at(gaps.place_of(i)) = loaded[j];
  }
}

}  // namespace thimble::cuda
