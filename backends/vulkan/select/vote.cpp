// vote: combines the heads' scores into one vote an entry or a position; a max-pool over them takes two
// dispatches more.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint32_t kTile = 128;  // entries or positions of a workgroup

// Scratch of a max-pool over at most so many votes: the candidates' votes, their places, and how many there
// are in each tile and in all.
struct WindowScratch {
  uint64_t votes, places, counts;  // bytes
  explicit WindowScratch(uint64_t n)
      : votes(n * sizeof(float)),
        places(n * sizeof(uint32_t)),
        counts((ceil_div(n, kTile) + 1) * sizeof(uint32_t)) {}
  uint64_t all() const { return votes + places + counts; }
};

}  // namespace

void vote(Recording& r, const Vote& op) {
  const VoteParams& p = op.p;
  const uint32_t has_gate = op.gate ? 1 : 0, pools = p.window > 1 ? 1 : 0;
  // Entries of all heads or positions, whichever are more: the scope is a matter of the step.
  const uint64_t tiles = std::max(ceil_div(p.vote_capacity, kTile), p.heads * ceil_div(p.capacity, kTile));
  const uint32_t groups = static_cast<uint32_t>(std::min<uint64_t>(tiles, r.limits().max_groups));
  View votes, places, counts;
  const uint64_t most_votes = op.votes.bytes / sizeof(float);  // the view is as large as either scope needs
  if (pools) {
    const WindowScratch bytes(most_votes);
    votes = r.scratch().slice(0, bytes.votes);
    places = r.scratch().slice(bytes.votes, bytes.places);
    counts = r.scratch().slice(bytes.votes + bytes.places, bytes.counts);
  }
  r.dispatch(
      Shader::kVote, {has_gate, pools},
      {reads(op.scores), reads(op.lse), reads(op.pos), reads(op.gate), writes(op.votes), writes(counts)}, p,
      groups);
  if (!pools) return;
  struct {
    VoteParams p;
    uint32_t tiles;
  } push{p, static_cast<uint32_t>(ceil_div(most_votes, kTile))};
  r.dispatch(Shader::kVotePack, {has_gate},
             {reads(op.votes), reads(op.gate), writes(counts), writes(votes), writes(places)}, push, groups);
  r.dispatch(Shader::kVoteWindow, {has_gate},
             {reads(votes), reads(places), reads(counts), reads(op.gate), writes(op.votes)}, push, groups);
}

uint64_t vote_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  if (s.positions == 0) return 0;
  return WindowScratch(std::max<uint64_t>(s.positions, uint64_t(m.kv_heads) * s.pool_capacity)).all();
}

}  // namespace thimble::vulkan
