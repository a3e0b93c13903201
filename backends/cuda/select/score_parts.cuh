// The parts of the heads' log-sum-exps that the blocks which score a selection's middle leave, and the code
// that adds them.
#pragma once

#include "backends/cuda/head_blocks.cuh"
#include "backends/cuda/log_sum.cuh"

namespace thimble::cuda {

// The number of a head's units that a step scores: those of the middle; 0 if the step does not select from
// this head.
__device__ inline uint32_t scored_units(const StepParams& s, const HeadState& head, uint32_t page) {
  const uint32_t n = units(step_entries(s, head), page);
  return selects(s, n) ? middle_end(s, n) - s.n_init : 0;
}
// The heads' work, by which blocks are divided among them; `heads`: those of the op.
struct ScoredHeads {
  StepParams s;
  const HeadState* heads;
  uint32_t page;
  __device__ uint32_t operator()(uint32_t head) const { return scored_units(s, heads[head], page); }
};

// Stored in scratch until an op other than vote and top_k uses it: [query heads][blocks of the KV head].
struct ScoreParts {
  LogSum* sums;
  const HeadState* heads;  // those of the op
  uint32_t each;           // blocks per head if their work is equal
};
// Index of the first part of a query head, whose number is within its group.
__device__ inline uint32_t first_part_of(const HeadBlocks& own, uint32_t group, uint32_t query_head) {
  return own.first * group + query_head * own.count;
}

// Query heads that a block scores with the same keys.
inline constexpr uint32_t kMostScoreHeads = 8;
inline uint32_t score_heads_at_once(uint32_t group) { return group <= 4 ? 4 : kMostScoreHeads; }
inline uint64_t score_parts_bytes(uint64_t blocks) {
  return round_up(blocks * kMostScoreHeads * sizeof(LogSum), 256);
}

// The parts that token_score leaves.
ScoreParts score_parts(const Launch&, const TokenScoreParams&);

// Adds the parts of all `heads` KV heads.
void sum_score_parts(const Launch&, const ScoreParts& parts, uint32_t heads, uint32_t group, uint32_t page,
                     const GateState* gate, float* lse);

}  // namespace thimble::cuda
