// What the blocks that score a selection's middle leave of the heads' log-sum-exps, and who adds them up.
#pragma once

#include "backends/cuda/head_blocks.cuh"
#include "backends/cuda/log_sum.cuh"

namespace thimble::cuda {

// Units of a head that a step scores: those of the middle; 0 where it does not select from this head.
__device__ inline uint32_t scored_units(const StepParams& s, const HeadState& head, uint32_t page) {
  const uint32_t n = units(step_entries(s, head), page);
  return selects(s, n) ? middle_end(s, n) - s.n_init : 0;
}
// By these the blocks are shared among heads; `heads`: those of the op.
struct ScoredHeads {
  StepParams s;
  const HeadState* heads;
  uint32_t page;
  __device__ uint32_t operator()(uint32_t head) const { return scored_units(s, heads[head], page); }
};

// In scratch, until an op other than vote and top_k uses it: [query heads][blocks of the KV head].
struct ScoreParts {
  LogSum* sums;
  const HeadState* heads;  // those of the op
  uint32_t each;           // blocks of a head where their work is equal
};
// The first part of a query head, numbered within its group.
__device__ inline uint32_t first_part_of(const HeadBlocks& own, uint32_t group, uint32_t query_head) {
  return own.first * group + query_head * own.count;
}

// Query heads that a block scores against the same keys.
inline constexpr uint32_t kMostScoreHeads = 8;
inline uint32_t score_heads_at_once(uint32_t group) { return group <= 4 ? 4 : kMostScoreHeads; }
inline uint64_t score_parts_bytes(uint64_t blocks) {
  return round_up(blocks * kMostScoreHeads * sizeof(LogSum), 256);
}

// What token_score leaves.
ScoreParts score_parts(const Launch&, const TokenScoreParams&);

// Adds up the parts of all `heads` KV heads.
void sum_score_parts(const Launch&, const ScoreParts& parts, uint32_t heads, uint32_t group, uint32_t page,
                     const GateState* gate, float* lse);

}  // namespace thimble::cuda
