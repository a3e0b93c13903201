// top_k: turns scores into ascending lists.
#include <algorithm>

#include "backends/cuda/ops.h"
#include "backends/cuda/select/top_k_threshold.cuh"

namespace thimble::cuda {

bool can_vote(const Launch& l, const VoteParams& p) {
  // With one block per head, making the votes would take longer than a separate launch.
  return p.scope == kVoteGroup && p.page == 1 && p.window <= 1 && p.group <= topk::kMostVoters &&
         l.card.major >= 9;
}

void top_k(const Launch& l, const TopK& op, const Vote* vote, const TokenScore* scored) {
  const TopKParams& p = op.p;
  topk::Operands o{l.step,
                   l.heads + p.head_state,
                   data<float>(op.scores),
                   data<float>(op.chunk_scores),
                   data<int32_t>(op.pos),
                   data<GateState>(op.gate),
                   data<uint32_t>(op.list),
                   p,
                   {}};
  if (vote) {
    o.ballot = {data<float>(vote->scores), data<float>(vote->lse), data<float>(vote->votes), vote->p, {}};
    if (scored) o.ballot.sums = score_parts(l, scored->p);
  }
  // A head's own scores may be as many as the layer's arrays hold; a list of kept entries usually has space
  // for all of them.
  const uint64_t units = (p.in_runs ? op.scores.bytes / sizeof(float) : p.score_capacity) +
                         (op.chunk_scores ? p.chunk_capacity : 0);
  const topk::Most most{units,
                        p.keep == kKeepOfHead ? std::min<uint64_t>(units, p.list_capacity - 1) : units};
  if (topk::takes_one_kernel(l.card, most))
    topk::launch_one_kernel(l, o, most);
  else
    topk::launch_several_kernels(l, o, most);
}

void top_k(const Launch& l, const TopK& op) { top_k(l, op, nullptr, nullptr); }

uint64_t top_k_scratch(const ModelShape& model, const SessionShape& session, const Card& card) {
  const uint64_t entries =
      std::max<uint64_t>(uint64_t(session.layer_entries) + session.chunk, session.positions);
  return topk::takes_one_kernel(card, {entries, entries})
             ? 0
             : topk::several_kernels_scratch(card, model.kv_heads);
}

}  // namespace thimble::cuda
