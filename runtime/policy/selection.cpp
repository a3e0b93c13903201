#include "runtime/policy/selection.h"

namespace thimble {

void select_entries(const SessionOptions& o, bool evicted, uint32_t generation, StepParams& step) {
  if (o.selection == Selection::kDense) return;
  step.n_init = o.select_init;
  step.n_local = o.select_local;
  step.select_k = o.select_k;
  step.theta = o.select_theta;
  step.generation = generation;
  const bool group = o.vote == VoteScope::kGroup || (o.vote == VoteScope::kAuto && evicted);
  step.vote_scope = group ? kVoteGroup : kVoteLayer;
}

}  // namespace thimble
