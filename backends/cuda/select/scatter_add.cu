// scatter_add: adds the values of heads to positions. A block owns a range of positions and goes through the
// heads, so every sum is made in the same order.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

// Positions per block, one per thread: a head adds to them at most this many entries
constexpr uint32_t kSlots = 256;
constexpr uint32_t kWarps = kSlots / kWarp;

// The entries of its run that a head attends to.
struct Head {
  const int32_t* pos;
  const float* weights;  // null: all 1
  EntryList list;
  uint32_t begin;  // the first entry in the head's window

  __device__ int64_t position(uint32_t n) const { return pos[list[n]]; }
};

__device__ Head head_of(const HeadState* heads, const ScatterAddParams& p, uint32_t head, const int32_t* pos,
                        const float* weights, const uint32_t* lists) {
  const HeadState state = heads[head];
  const EntryList list = entry_list(lists, head, p.list_capacity, state.n_entries);
  return {pos + state.first, weights ? weights + state.first : nullptr, list,
          window_begin(p.window, list.count)};
}

// The first index whose position is at least `first`. A warp tests 32 candidates at a time, because loads
// dominate.
__device__ uint32_t lower_bound(const Head& head, int64_t first) {
  uint32_t begin = head.begin, end = head.list.count;
  while (begin < end) {
    const uint32_t stride = (end - begin + kWarp - 1) / kWarp, i = begin + threadIdx.x % kWarp * stride;
    const uint32_t before = __popc(__ballot_sync(~0u, i < end && head.position(i) < first));
    if (before == 0) return begin;
    end = min(end, begin + before * stride);
    begin += (before - 1) * stride + 1;
  }
  return begin;
}

// `heads`: from KV head 0 of the layer on.
__global__ void __launch_bounds__(kSlots)
    scatter_add_kernel(const StepParams* step, const HeadState* heads, ScatterAddParams p, const int32_t* pos,
                       const float* weights, const uint32_t* lists, float* sums) {
  __shared__ uint32_t begins[kWarps];
  __shared__ float own[kSlots];
  const StepParams s = begin_kernel(step);
  const uint32_t slot = blockIdx.x * kSlots + threadIdx.x, warp = threadIdx.x / kWarp;
  const int64_t first = int64_t(s.position) + blockIdx.x * kSlots;
  own[threadIdx.x] = p.add && slot < p.slots ? sums[slot] : 0;
  // kWarps heads at a time; each warp searches in one
  for (uint32_t done = 0; done < p.heads; done += kWarps) {
    const uint32_t count = min(p.heads - done, kWarps), base = p.first_head + done;
    if (warp < count) {
      const uint32_t begin = lower_bound(head_of(heads, p, base + warp, pos, weights, lists), first);
      if (threadIdx.x % kWarp == 0) begins[warp] = begin;
    }
    __syncthreads();
    int64_t to[kWarps];  // loads of all heads overlap
    float weight[kWarps];
#pragma unroll
    for (uint32_t h = 0; h < kWarps; ++h) {
      to[h] = -1, weight[h] = 0;
      if (h >= count) continue;
      const Head head = head_of(heads, p, base + h, pos, weights, lists);
      const uint32_t n = begins[h] + threadIdx.x;
      if (n >= head.list.count) continue;
      to[h] = head.position(n) - first;
      weight[h] = head.weights ? head.weights[n] : 1;
    }
#pragma unroll
    for (uint32_t h = 0; h < kWarps; ++h) {
      if (to[h] >= 0 && to[h] < kSlots) own[to[h]] += weight[h];
      __syncthreads();
    }
  }
  if (slot < p.slots) sums[slot] = own[threadIdx.x];
}

}  // namespace

void scatter_add(const Launch& l, const ScatterAdd& op) {
  launch(l, scatter_add_kernel, units(op.p.slots, kSlots), kSlots, 0, l.step, l.heads + op.p.head_state, op.p,
         data<int32_t>(op.pos), data<float>(op.weights), data<uint32_t>(op.list), data<float>(op.sums));
}

}  // namespace thimble::cuda
