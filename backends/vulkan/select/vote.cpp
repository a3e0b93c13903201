// vote: combines the heads' scores into one vote per entry, page or position; a max-pool over them takes two
// more dispatches.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint32_t kTile = 128;  // votes per workgroup

// The scratch of a max-pool over at most this many votes: the candidates' votes, their positions, and their
// numbers per tile and in total.
struct WindowScratch {
  uint64_t votes, places, counts;  // in bytes
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
  const uint32_t of_layer = p.scope == kVoteLayer ? 1 : 0, heads = of_layer ? 1 : p.heads;
  const uint32_t groups =
      static_cast<uint32_t>(std::min<uint64_t>(ceil_div(p.vote_capacity, kTile), r.limits().max_groups));
  View votes, places, counts;
  const uint64_t most_votes = uint64_t(heads) * p.vote_capacity;
  if (pools) {
    const WindowScratch bytes(most_votes);
    votes = r.scratch().slice(0, bytes.votes);
    places = r.scratch().slice(bytes.votes, bytes.places);
    counts = r.scratch().slice(bytes.votes + bytes.places, bytes.counts);
  }
  r.dispatch(
      Shader::kVote, {has_gate, pools, of_layer},
      {reads(op.scores), reads(op.lse), reads(op.pos), reads(op.gate), writes(op.votes), writes(counts)}, p,
      groups, heads);
  if (!pools) return;
  struct {
    VoteParams p;
    uint32_t tiles;
  } push{p, static_cast<uint32_t>(ceil_div(most_votes, kTile))};
  r.dispatch(Shader::kVotePack, {has_gate, of_layer},
             {reads(op.votes), reads(op.gate), writes(counts), writes(votes), writes(places)}, push, groups,
             heads);
  r.dispatch(Shader::kVoteWindow, {has_gate, of_layer},
             {reads(votes), reads(places), reads(counts), reads(op.gate), writes(op.votes)}, push, groups,
             heads);
}

uint64_t vote_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  if (s.positions == 0) return 0;
  return WindowScratch(std::max<uint64_t>(s.positions, uint64_t(m.kv_heads) * s.reach)).all();
}

}  // namespace thimble::vulkan
