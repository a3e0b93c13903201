// vote and the top_k of its votes, in two dispatches: the workgroups that vote count the keys of what they
// write, so that those that list know about where the threshold is.
#include "backends/fusion.h"
#include "backends/vulkan/ops.h"
#include "backends/vulkan/select/top_k.h"

namespace thimble::vulkan {
namespace {

// What one dispatch leaves for the other, as vote_count.comp says.
struct CountedVotes {
  uint32_t threads, each;        // of a workgroup that votes; votes of a thread, at most
  uint64_t reach, sorted, bins;  // bytes
  CountedVotes(const Limits& l, uint32_t heads, uint64_t entries)
      : threads(std::min(kVoteBins, std::bit_floor(l.max_group_threads))),
        each(static_cast<uint32_t>(ceil_div(entries, kListParts * threads))),
        reach(uint64_t(heads) * kListParts * kVoteBins * sizeof(uint32_t)),
        sorted(uint64_t(heads) * kListParts * each * threads * sizeof(uint32_t[2])),
        bins(heads * sizeof(uint32_t[2])) {}
  uint64_t all() const { return reach + sorted + bins; }
};

// A layer's votes are counted in so many entries at most, which a thread's registers hold, and where entries
// may be positions.
constexpr uint32_t kMostCountedLayer = 1 << 16;
uint32_t counted_entries(const Vote& vote) {
  const VoteParams& p = vote.p;
  if (p.scope != kVoteLayer) return std::min(p.score_capacity, p.vote_capacity);
  return p.heads * p.group <= kMostCountedGroup && p.score_capacity == p.vote_capacity &&
                 p.score_capacity <= kMostCountedLayer
             ? p.score_capacity
             : 1;
}

}  // namespace

bool lists_votes(const Limits& limits, const Vote& vote, const TopK& list) {
  return makes_votes(vote, list) && vote.p.page == 1 && vote.p.window <= 1 &&
         vote.p.group <= kMostCountedGroup &&
         (takes_one_group(limits, candidates(list)) ||
          (vote.p.scope == kVoteLayer && counted_entries(vote) >= candidates(list)));
}

void vote_top_k(Recording& r, const TokenScore* score, const Vote& vote, const TopK& list) {
  const uint32_t heads = vote.p.heads, has_gate = vote.gate ? 1 : 0, of_layer = vote.p.scope == kVoteLayer;
  const bool in_parts = score && !of_layer;  // a layer's log-sum-exps are needed whole
  View parts;
  if (score) token_score(r, *score, in_parts);
  if (in_parts) parts = r.scratch().slice(0, score_parts_bytes(heads * vote.p.group));
  const CountedVotes counted(r.limits(), of_layer ? 1 : heads, counted_entries(vote));
  const View own = r.scratch().slice(parts.bytes, counted.all());
  const View reach = own.slice(0, counted.reach), sorted = own.slice(counted.reach, counted.sorted),
             bins = own.slice(counted.reach + counted.sorted, counted.bins);
  r.dispatch(
      Shader::kVoteCount,
      {counted.threads, has_gate, counted.each, in_parts ? 1u : 0u, r.limits().subgroup_size, of_layer},
      {reads(vote.scores), writes(vote.lse), reads(vote.pos), reads(vote.gate), writes(vote.votes),
       writes(reach), writes(sorted), writes(bins), reads(parts)},
      vote.p, kListParts, heads);
  const struct {
    TopKParams p;
    uint32_t parts, digit;
  } push{list.p, kListParts, 0};
  r.dispatch(Shader::kTopKVotes, {counted.threads, has_gate, 0, 1, counted.each * counted.threads},
             {reads(list.scores), reads({}), reads(list.pos), reads(list.gate), writes(list.list),
              reads(reach), reads(sorted), reads(bins)},
             push, kListParts, heads);
}

uint64_t vote_top_k_scratch(const ModelShape& m, const SessionShape& s, const Limits& l) {
  if (s.positions == 0) return 0;
  const uint64_t of_group = std::min<uint64_t>(s.reach, most_of_one_group(l)),
                 of_layer = std::min<uint64_t>(s.reach, kMostCountedLayer);
  return token_score_scratch(m, s, l) +
         std::max(CountedVotes(l, m.kv_heads, of_group).all(), CountedVotes(l, 1, of_layer).all());
}

}  // namespace thimble::vulkan
