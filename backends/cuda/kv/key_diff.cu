// key_diff: how unlike the mean of all keys each key is. A block takes a block of entries, in two kernels:
// the first adds their unit keys, the second adds those sums in order and scores. A warp reads a key.
#include "backends/cuda/kv_format.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp, kMostPairs = kMostHeadDim / 2;

// The entries of a block, and where their keys and scores are stored. `heads`: of KV head 0 and later ones.
struct Entries {
  uint32_t head, n, begin, end;
  uint64_t run, chunk;  // entry 0 of the head in the layer's arrays; row 0 in the chunk's
  uint32_t pooled;      // entries of the run

  __device__ Entries(const StepParams& step, const HeadState* heads, const KeyDiffParams& p) {
    head = p.first_head + blockIdx.y;
    const HeadState state = heads[head];
    n = step_entries(step, state);
    begin = blockIdx.x * kKeyDiffBlock;
    end = min(begin + kKeyDiffBlock, n);
    run = state.first;
    chunk = uint64_t(head) * p.chunk_capacity;
    pooled = state.n_entries;
  }
  // An entry in [run][width] or [heads][chunk_capacity][width].
  template <typename T>
  __device__ T* at(T* pool, T* of_chunk, uint32_t entry, uint32_t width) const {
    return entry < pooled ? pool + (run + entry) * width : of_chunk + (chunk + entry - pooled) * width;
  }
};

template <typename Format>
__global__ void __launch_bounds__(kThreads)
    add_unit_keys(const StepParams* step, const HeadState* heads, KeyDiffParams p,
                  const typename Format::Unit* k, const typename Format::Unit* chunk_k, float2* sums) {
  __shared__ float inverse[kKeyDiffBlock];
  const StepParams s = begin_kernel(step);
  const Entries e(s, heads, p);
  if (e.begin >= e.end) return;
  const uint32_t pairs = p.head_dim / 2, row_units = Format::row_units(p.head_dim),
                 lane = threadIdx.x % kWarp, count = e.end - e.begin;
  for (uint32_t i = threadIdx.x / kWarp; i < count; i += kWarps) {
    const typename Format::Unit* key = e.at(k, chunk_k, e.begin + i, row_units);
    float squares = 0;
    for (uint32_t pair = lane; pair < pairs; pair += kWarp) {
      const float2 x = Format::load_two(key, p.head_dim, pair);
      squares += x.x * x.x + x.y * x.y;
    }
    squares = warp_sum(squares);
    if (lane == 0) inverse[i] = squares > 0 ? 1 / sqrtf(squares) : 0;  // 0: it does not count
  }
  __syncthreads();
  for (uint32_t pair = threadIdx.x; pair < pairs; pair += kThreads) {
    float2 sum{0, 0};
    for (uint32_t i = 0; i < count; ++i) {
      if (inverse[i] == 0) continue;
      const float2 x = Format::load_two(e.at(k, chunk_k, e.begin + i, row_units), p.head_dim, pair);
      sum.x += inverse[i] * x.x;
      sum.y += inverse[i] * x.y;
    }
    sums[(uint64_t(e.head) * p.blocks + blockIdx.x) * pairs + pair] = sum;
  }
}

template <typename Format>
__global__ void __launch_bounds__(kThreads)
    score_keys(const StepParams* step, const HeadState* heads, KeyDiffParams p,
               const typename Format::Unit* k, const typename Format::Unit* chunk_k, const float2* sums,
               float* cis, float* chunk_cis) {
  __shared__ float2 total[kMostPairs];
  const StepParams s = begin_kernel(step);
  const Entries e(s, heads, p);
  if (e.begin >= e.end) return;
  const uint32_t pairs = p.head_dim / 2, row_units = Format::row_units(p.head_dim),
                 lane = threadIdx.x % kWarp;
  for (uint32_t pair = threadIdx.x; pair < pairs; pair += kThreads) {
    float2 sum{0, 0};
    for (uint32_t block = 0; block < units(e.n, kKeyDiffBlock); ++block) {
      const float2 x = sums[(uint64_t(e.head) * p.blocks + block) * pairs + pair];
      sum.x += x.x;
      sum.y += x.y;
    }
    total[pair] = sum;
  }
  __syncthreads();
  for (uint32_t entry = e.begin + threadIdx.x / kWarp; entry < e.end; entry += kWarps) {
    const typename Format::Unit* key = e.at(k, chunk_k, entry, row_units);
    float dot = 0, squares = 0, of_total = 0;
    for (uint32_t pair = lane; pair < pairs; pair += kWarp) {
      const float2 x = Format::load_two(key, p.head_dim, pair), t = total[pair];
      dot += x.x * t.x + x.y * t.y;
      squares += x.x * x.x + x.y * x.y;
      of_total += t.x * t.x + t.y * t.y;
    }
    dot = warp_sum(dot);
    const float product = warp_sum(squares) * warp_sum(of_total);
    if (lane == 0) *e.at(cis, chunk_cis, entry, 1) = product == 0 ? -1.0f : -dot / sqrtf(product);
  }
}

}  // namespace

void key_diff(const Launch& l, const KeyDiff& op) {
  const KeyDiffParams& p = op.p;
  const dim3 blocks(p.blocks, p.heads);
  const HeadState* heads = l.heads + p.head_state;
  with_format(op.k.type, [&]<typename Format>(Format) {
    using Unit = typename Format::Unit;
    const Unit *k = data<Unit>(op.k.values), *chunk_k = data<Unit>(op.chunk_k.values);
    launch(l, add_unit_keys<Format>, blocks, kThreads, 0, l.step, heads, p, k, chunk_k,
           data<float2>(op.sums));
    launch(l, score_keys<Format>, blocks, kThreads, 0, l.step, heads, p, k, chunk_k, data<float2>(op.sums),
           data<float>(op.cis), data<float>(op.chunk_cis));
  });
}

}  // namespace thimble::cuda
