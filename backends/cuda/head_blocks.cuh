// How the blocks of a launch are divided among KV heads with runs of different lengths. The grid is (each,
// heads): `each` blocks per head if their work is equal; otherwise every head gets one block, and the rest
// are divided by the heads' work. Device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// Blocks [first, first + count) of the launch belong to this head.
struct HeadBlocks {
  uint32_t head, first, count;
  uint32_t work;  // the head's work
};

// Whether all heads have as much work as the first one. They nearly always have, and kernels of a few
// microseconds wait for the answer, so it takes one load and no division.
template <typename Work>
__device__ inline bool equal_work(uint32_t heads, const Work& work, uint32_t& first) {
  const uint32_t lane = threadIdx.x % kWarp, own = work(min(lane, heads - 1));
  first = __shfl_sync(~0u, own, 0);
  bool equal = own == first;
  for (uint32_t head = lane + kWarp; head < heads; head += kWarp) equal = equal && work(head) == first;
  return __all_sync(~0u, equal);
}

// Divides `blocks` among heads, at least one per head; work(head) is the number of entries that a head
// processes. A warp calls this with the same arguments in all lanes. Returns the first head for which
// is(head, end of its blocks) holds; `heads` and no blocks if there is none.
template <typename Work, typename Is>
__device__ inline HeadBlocks find_head_blocks(uint32_t blocks, uint32_t heads, const Work& work,
                                              const Is& is) {
  // In units of 16 entries, the product with the number of blocks fits 32 bits for runs of up to 16M entries.
  const auto units = [&](uint32_t head) { return head < heads ? (work(head) + 15) / 16 : 0; };
  const uint32_t lane = threadIdx.x % kWarp, spare = blocks - heads;
  uint32_t all = 0;
  for (uint32_t first = 0; first < heads; first += kWarp) all += units(first + lane);
  all = max(__reduce_add_sync(~0u, all), 1u);
  uint32_t before = 0;
  for (uint32_t first = 0; first < heads; first += kWarp) {
    const uint32_t head = first + lane, count = head < heads ? 1 + spare * units(head) / all : 0;
    uint32_t end = count;
#pragma unroll
    for (uint32_t offset = 1; offset < kWarp; offset *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, end, offset);
      if (lane >= offset) end += other;
    }
    end += before;
    if (const uint32_t those = __ballot_sync(~0u, head < heads && is(head, end))) {
      const uint32_t finder = __ffs(those) - 1, found_end = __shfl_sync(~0u, end, finder),
                     found_count = __shfl_sync(~0u, count, finder);
      return {first + finder, found_end - found_count, found_count, work(first + finder)};
    }
    before = __shfl_sync(~0u, end, kWarp - 1);
  }
  return {heads, blocks, 0, 0};
}

// The number of this block in the grid (each, heads).
__device__ inline uint32_t block_of_heads() { return blockIdx.y * gridDim.x + blockIdx.x; }

// The head that this block works on; `heads` for a surplus block. A warp calls this and the functions below.
template <typename Work>
__device__ inline HeadBlocks blocks_around(const Work& work) {
  const uint32_t head = blockIdx.y, heads = gridDim.y, each = gridDim.x;
  uint32_t of_each;
  if (equal_work(heads, work, of_each)) return {head, head * each, each, of_each};
  return find_head_blocks(each * heads, heads, work,
                          [](uint32_t, uint32_t end) { return block_of_heads() < end; });
}
template <typename Work>
__device__ inline HeadBlocks blocks_of_head(uint32_t head, uint32_t each, uint32_t heads, const Work& work) {
  uint32_t of_each;
  if (equal_work(heads, work, of_each)) return {head, head * each, each, of_each};
  return find_head_blocks(each * heads, heads, work, [&](uint32_t h, uint32_t) { return h == head; });
}

}  // namespace thimble::cuda
