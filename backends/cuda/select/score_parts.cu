#include "backends/cuda/select/score_parts.cuh"

namespace thimble::cuda {

// One warp per query head, whose parts are few enough to be loaded all at once.
static __global__ void sum_score_parts_kernel(const StepParams* step, ScoreParts parts, uint32_t heads,
                                              uint32_t group, uint32_t page, const GateState* gate,
                                              float* lse) {
  release_successor();
  const StepParams s = *step;
  const ScoredHeads scored{s, parts.heads, page};
  const uint32_t query = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp,
                 head = min(query / group, heads - 1);
  const HeadBlocks own = blocks_of_head(head, parts.each, heads, scored);
  const bool works = query < heads * group && own.work > 0;
  await_predecessor();
  if (!works || selection_cached(gate)) return;
  const LogSum* const sums = parts.sums + first_part_of(own, group, query % group);
  const float sum = log_sum_exp(sums, own.count, first_part(sums, own.count));
  if (threadIdx.x % kWarp == 0) lse[query] = sum;
}

void sum_score_parts(const Launch& l, const ScoreParts& parts, uint32_t heads, uint32_t group, uint32_t page,
                     const GateState* gate, float* lse) {
  constexpr uint32_t kWarps = 4;
  launch(l, sum_score_parts_kernel, static_cast<uint32_t>(ceil_div(heads * group, kWarps)), kWarps * kWarp, 0,
         l.step, parts, heads, group, page, gate, lse);
}

}  // namespace thimble::cuda
