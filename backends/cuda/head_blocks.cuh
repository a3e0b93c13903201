// How the blocks of a launch are shared among KV heads whose runs differ in length: every head has one, and
// the rest go by the heads' work. Heads with equal work get equally many. Device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// The blocks [first, first + count) of a launch are this head's.
struct HeadBlocks {
  uint32_t head, first, count;
};

// Shares out `blocks`, at least one a head; work(head) is how many entries a head works on. Called by a warp,
// with the same arguments in all of its lanes. It gives the first head for which is(head, end of its blocks)
// holds; `heads` and no blocks if there is none.
template <typename Work, typename Is>
__device__ inline HeadBlocks find_head_blocks(uint32_t blocks, uint32_t heads, const Work& work,
                                              const Is& is) {
  // In units of 16 entries their product with the blocks has 32 bits for runs of 16M entries.
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
      return {first + finder, found_end - found_count, found_count};
    }
    before = __shfl_sync(~0u, end, kWarp - 1);
  }
  return {heads, blocks, 0};
}

// The head that a block works on; `heads` where the block is left over.
template <typename Work>
__device__ inline HeadBlocks blocks_around(uint32_t block, uint32_t blocks, uint32_t heads,
                                           const Work& work) {
  return find_head_blocks(blocks, heads, work, [&](uint32_t, uint32_t end) { return block < end; });
}
template <typename Work>
__device__ inline HeadBlocks blocks_of_head(uint32_t head, uint32_t blocks, uint32_t heads,
                                            const Work& work) {
  return find_head_blocks(blocks, heads, work, [&](uint32_t h, uint32_t) { return h == head; });
}

}  // namespace thimble::cuda
