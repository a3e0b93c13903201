// vote and the top_k of its votes, in two dispatches: the workgroups that vote count the keys of what they
// write, so that those that list know about where the threshold is.
#include "backends/joins.h"
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

}  // namespace

bool lists_votes(const Limits& limits, const Vote& vote, const TopK& list) {
  return makes_votes(vote, list) && vote.p.window <= 1 && vote.p.group <= kMostCountedGroup &&
         takes_one_group(limits, candidates(list));
}

void vote_top_k(Recording& r, const TokenScore* score, const Vote& vote, const TopK& list) {
  View parts;
  if (score) {
    token_score(r, *score, true);
    parts = score_parts_view(r, *score);
  }
  const uint32_t heads = vote.p.heads, has_gate = vote.gate ? 1 : 0;
  const CountedVotes counted(r.limits(), heads, std::min(vote.p.capacity, vote.p.vote_capacity));
  const View own = r.scratch().slice(parts.bytes, counted.all());
  const View reach = own.slice(0, counted.reach), sorted = own.slice(counted.reach, counted.sorted),
             bins = own.slice(counted.reach + counted.sorted, counted.bins);
  const struct {
    VoteParams p;
    uint32_t score_parts;
  } voting{vote.p, static_cast<uint32_t>(parts.bytes / (uint64_t(heads) * vote.p.group * sizeof(float[2])))};
  r.dispatch(Shader::kVoteCount,
             {counted.threads, has_gate, counted.each, score ? 1u : 0u, r.limits().subgroup_size},
             {reads(vote.scores), writes(vote.lse), reads(vote.pos), reads(vote.gate), writes(vote.votes),
              writes(reach), writes(sorted), writes(bins), reads(parts)},
             voting, kListParts, heads);
  const struct {
    TopKParams p;
    uint32_t parts, digit;
  } push{list.p, kListParts, 0};
  r.dispatch(Shader::kTopKVotes, {counted.threads, has_gate, 0, counted.each * counted.threads},
             {reads(list.scores), reads({}), reads(list.pos), reads(list.gate), writes(list.list),
              reads(reach), reads(sorted), reads(bins)},
             push, kListParts, heads);
}

uint64_t vote_top_k_scratch(const ModelShape& m, const SessionShape& s, const Limits& l) {
  if (s.positions == 0 || !takes_one_group(l, s.pool_capacity)) return 0;
  return token_score_scratch(m, s, l) + CountedVotes(l, m.kv_heads, s.pool_capacity).all();
}

}  // namespace thimble::vulkan
