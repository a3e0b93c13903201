// Lists the units that a threshold picks, with ordered scans. Device side; all threads of a block call these
// functions.
#pragma once

#include "backends/cuda/select/top_k_threshold.cuh"

namespace thimble::cuda::topk {

// Sets a bit in `marks` for each picked unit of the range, and counts them in b.marked. `pos` as in HeadWork.
template <typename Keys>
__device__ inline void mark_picked(Shared& b, Range range, const Keys& keys, const int32_t* pos,
                                   Threshold threshold, uint32_t* marks) {
  if (threadIdx.x == 0) b.marked = 0;
  __syncthreads();
  constexpr uint32_t kLoads = 4;  // in flight at once
  const uint32_t tiles = (range.size() + kWarp - 1) / kWarp;
  uint32_t count = 0;
#pragma unroll 1
  for (uint32_t first = warp(); first < tiles; first += kLoads * kWarps) {
    const uint32_t entry = range.begin + first * kWarp + lane();
    uint32_t index[kLoads], key[kLoads];
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) index[j] = min(entry + j * kThreads, range.end - 1);
    if (pos)
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j) index[j] = static_cast<uint32_t>(pos[index[j]]);
    keys.get(index, key);
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) {
      if (first + j * kWarps >= tiles) break;
      const uint32_t those =
          __ballot_sync(~0u, entry + j * kThreads < range.end && threshold.picks(key[j], index[j]));
      if (lane() == 0) marks[first + j * kWarps] = those;
      count += __popc(those);
    }
  }
  if (lane() == 0 && count) atomicAdd(&b.marked, count);
  __syncthreads();
}

// Writes the entries of the marked units of a range, in order.
__device__ inline void write_marked(Shared& b, Range range, uint32_t page, const uint32_t* marks,
                                    uint32_t* to) {
  const uint32_t tiles = (range.size() + kWarp - 1) / kWarp;
  for (uint32_t first = 0; first < tiles;
       first += kThreads) {  // each thread counts a tile, then the warps write together
    const uint32_t own = first + threadIdx.x, count = own < tiles ? __popc(marks[own]) : 0, end = scan(count);
    if (lane() == kWarp - 1) b.warp_sums[warp()] = end;
    __syncthreads();
    const uint32_t sum = lane() < kWarps ? b.warp_sums[lane()] : 0;
    b.before[threadIdx.x] = __reduce_add_sync(~0u, lane() < warp() ? sum : 0) + end - count;
    __syncthreads();
    const auto write = [&](uint32_t tile, uint32_t i) {  // writes entry i of the lane's unit
      const uint32_t those = marks[first + tile];
      if (those >> lane() & 1)
        to[(b.before[tile] + __popc(those & ((1u << lane()) - 1))) * page + i] =
            (range.begin + (first + tile) * kWarp + lane()) * page + i;
    };
    if (page == 1) {
#pragma unroll 4
      for (uint32_t tile = warp(); tile < min(kThreads, tiles - first); tile += kWarps) write(tile, 0);
    } else {
#pragma unroll 1
      for (uint32_t tile = warp(); tile < min(kThreads, tiles - first); tile += kWarps)
        for (uint32_t i = 0; i < page; ++i) write(tile, i);
    }
    to += __reduce_add_sync(~0u, sum) * page;
  }
}

// One of `parts` pieces of the entries that are listed regardless of their score, around the `picked` units
// of the middle, and the count. They include the step's row, so all pages of the middle are full.
__device__ inline void list_ends(const HeadWork& w, uint32_t page, uint32_t picked, uint32_t* list,
                                 uint32_t part, uint32_t parts) {
  const uint32_t first = part * kThreads + threadIdx.x, begin = w.middle.begin * page,
                 end = w.middle.end * page, listed = begin + picked * page;
  if (first == 0) list[0] = listed + w.entries - end;
  for (uint32_t i = first; i < begin; i += parts * kThreads) list[1 + i] = i;
  uint32_t* behind = list + 1 + listed;
  for (uint32_t i = first; end + i < w.entries; i += parts * kThreads) behind[i] = end + i;
}

}  // namespace thimble::cuda::topk
