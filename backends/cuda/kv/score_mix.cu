// score_mix: adds two standardised scores of a head's entries. A block processes a head. It reads the scores
// three times: for the means, for the deviations, and for the sums.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 1024, kWarps = kThreads / kWarp;

// The sums of both over all threads, which all call it: threads of a warp, then warps in order.
__device__ float2 block_sum(float2 x) {
  __shared__ float2 sums[kWarps];
  x = {warp_sum(x.x), warp_sum(x.y)};
  __syncthreads();  // all threads have read the last call's sums
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  float2 sum{0, 0};
  for (uint32_t warp = 0; warp < kWarps; ++warp) {
    sum.x += sums[warp].x;
    sum.y += sums[warp].y;
  }
  return sum;
}

__device__ float inverse_deviation(float squares, float count) {
  const float deviation = sqrtf(squares / count);
  return deviation > 0 ? 1 / deviation : 0;
}

__global__ void __launch_bounds__(kThreads)
    score_mix_kernel(const StepParams* step, const HeadState* heads, ScoreMixParams p, const float* scores,
                     const float* chunk_scores, float* mixed, float* chunk_mixed) {
  const StepParams s = begin_kernel(step);
  const uint32_t head = p.first_head + blockIdx.x;
  const HeadState state = heads[head];
  const uint32_t entries = step_entries(s, state);
  if (state.keep >= entries) return;
  const Regions r = kept_regions(state, entries);
  const uint64_t chunk = uint64_t(head) * p.chunk_capacity;
  const auto at = [&](auto* pool, auto* of_chunk, uint32_t i) {
    return i < state.n_entries ? pool + state.first + i : of_chunk + chunk + i - state.n_entries;
  };
  // Calls work(a score, the other one) for this thread's entries.
  const auto for_entries = [&](const auto& work) {
    for (uint32_t i = r.begin + threadIdx.x; i < r.end; i += kThreads)
      work(*at(scores, chunk_scores, i), *at(mixed, chunk_mixed, i));
  };

  float2 sum{0, 0}, count{0, 0}, squares{0, 0};
  for_entries([&](float a, float b) {
    if (isfinite(a)) sum.x += a, ++count.x;
    if (isfinite(b)) sum.y += b, ++count.y;
  });
  sum = block_sum(sum);
  count = block_sum(count);
  const float2 mean{count.x > 0 ? sum.x / count.x : 0, count.y > 0 ? sum.y / count.y : 0};
  for_entries([&](float a, float b) {
    if (isfinite(a)) squares.x += (a - mean.x) * (a - mean.x);
    if (isfinite(b)) squares.y += (b - mean.y) * (b - mean.y);
  });
  squares = block_sum(squares);
  const float2 inverse{inverse_deviation(squares.x, count.x), inverse_deviation(squares.y, count.y)};
  for_entries(
      [&](float a, float& b) { b = (a - mean.x) * inverse.x + (b - mean.y) * inverse.y; });
}

}  // namespace

void score_mix(const Launch& l, const ScoreMix& op) {
  launch(l, score_mix_kernel, op.p.heads, kThreads, 0, l.step, l.heads + op.p.head_state, op.p,
         data<float>(op.scores), data<float>(op.chunk_scores), data<float>(op.mixed),
         data<float>(op.chunk_mixed));
}

}  // namespace thimble::cuda
