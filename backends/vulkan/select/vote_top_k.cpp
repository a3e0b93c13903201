// vote and the top_k of its votes, in two dispatches. The voting workgroups count the keys that they write,
// so the listing workgroups know the threshold's approximate position.
#include <algorithm>
#include <bit>

#include "backends/fusion.h"
#include "backends/vulkan/ops.h"
#include "backends/vulkan/select/top_k.h"

namespace thimble::vulkan {
namespace {

struct ListPush {
  TopKParams p;
  uint32_t parts, digit;
};

// ---- votes of groups ----

// The results of the first dispatch, as described in vote_count.comp.
struct CountedVotes {
  uint32_t threads, each;        // threads: per voting workgroup; each: the most votes per thread
  uint64_t reach, sorted, bins;  // in bytes
  CountedVotes(const Limits& l, uint32_t heads, uint64_t entries)
      : threads(l.threads(kVoteBins)),
        each(static_cast<uint32_t>(ceil_div(entries, kListParts * threads))),
        reach(uint64_t(heads) * kListParts * kVoteBins * sizeof(uint32_t)),
        sorted(uint64_t(heads) * kListParts * each * threads * sizeof(uint32_t[2])),
        bins(heads * sizeof(uint32_t[2])) {}
  uint64_t all() const { return reach + sorted + bins; }
};

void list_groups(Recording& r, const TokenScore* score, const Vote& vote, const TopK& list) {
  const uint32_t heads = vote.p.heads, has_gate = vote.gate ? 1 : 0;
  View parts;
  if (score) {
    token_score(r, *score, true, {});
    parts = r.scratch().slice(0, score_parts_bytes(heads * vote.p.group));
  }
  const CountedVotes counted(r.limits(), heads, std::min(vote.p.score_capacity, vote.p.vote_capacity));
  const View own = r.scratch().slice(parts.bytes, counted.all());
  const View reach = own.slice(0, counted.reach), sorted = own.slice(counted.reach, counted.sorted),
             bins = own.slice(counted.reach + counted.sorted, counted.bins);
  r.dispatch(Shader::kVoteCount,
             {counted.threads, has_gate, counted.each, score ? 1u : 0u, r.limits().subgroup_size},
             {reads(vote.scores), writes(vote.lse), reads(vote.pos), reads(vote.gate), writes(vote.votes),
              writes(reach), writes(sorted), writes(bins), reads(parts)},
             vote.p, kListParts, heads);
  r.dispatch(Shader::kTopKVotes, {counted.threads, has_gate, 0, 1, counted.each * counted.threads},
             {reads(list.scores), reads({}), reads(list.pos), reads(list.gate), writes(list.list),
              reads(reach), reads(sorted), reads(bins)},
             ListPush{list.p, kListParts, 0}, kListParts, heads);
}

// ---- votes of a layer ----

// The most votes among which workgroups search for those of one bin. If entries have moved, one workgroup per
// head does all of this alone.
constexpr uint32_t kMostCountedLayer = 1 << 16;
constexpr uint64_t kLayerCountBytes = kLayerCounts * sizeof(uint32_t);

bool counts_layer(const VoteParams& p) {
  return p.heads * p.group <= kMostLayerQueries && p.score_capacity == p.vote_capacity &&
         p.score_capacity <= kMostCountedLayer;
}

void list_layer(Recording& r, const TokenScore& score, const Vote& vote, const TopK& list) {
  const VoteParams& p = vote.p;
  const uint32_t has_gate = vote.gate ? 1 : 0;
  const View counts = r.scratch().slice(score_bytes(r, score.p), kLayerCountBytes);
  token_score(r, score, false, counts);
  // A thread reads 16 scores of an entry at once; threads that share an entry are in the same workgroup.
  constexpr uint32_t kThreads = 256, kAtOnce = 16, kMostSlices = 4;
  const uint32_t threads = r.limits().threads(kThreads),
                 slices = std::clamp(std::bit_ceil(p.heads * p.group) / kAtOnce, 1u, kMostSlices);
  r.dispatch(Shader::kVoteOfLayer, {threads, has_gate, slices},
             {reads(vote.scores), reads(vote.lse), reads(vote.pos), reads(vote.gate), writes(vote.votes),
              writes(counts)},
             p,
             static_cast<uint32_t>(
                 std::min<uint64_t>(ceil_div(p.vote_capacity, threads / slices), r.limits().max_groups)));
  const uint32_t part = static_cast<uint32_t>(ceil_div(p.score_capacity, kListParts));
  r.dispatch(
      Shader::kTopKOfLayer, {list_threads(r.limits()), has_gate, 0, 1, part},
      {reads(list.scores), reads({}), reads(list.pos), reads(list.gate), writes(list.list), reads(counts)},
      ListPush{list.p, kListParts, 0}, kListParts, p.heads);
}

}  // namespace

bool lists_votes(const Limits& limits, const Vote& vote, const TopK& list) {
  if (!makes_votes(vote, list) || vote.p.page != 1 || vote.p.window > 1) return false;
  if (vote.p.scope == kVoteLayer) return counts_layer(vote.p);
  return vote.p.group <= kMostCountedGroup && takes_one_group(limits, candidates(list));
}

void vote_top_k(Recording& r, const TokenScore* score, const Vote& vote_op, const TopK& list) {
  if (vote_op.p.scope != kVoteLayer) {
    list_groups(r, score, vote_op, list);
  } else if (score) {
    list_layer(r, *score, vote_op, list);
  } else {
    vote(r, vote_op);
    top_k(r, list);
  }
}

uint64_t vote_top_k_scratch(const ModelShape& m, const SessionShape& s, const Limits& l) {
  if (s.positions == 0) return 0;
  const uint64_t of_group = std::min<uint64_t>(s.reach, most_of_one_group(l));
  return token_score_scratch(m, s, l) +
         std::max(CountedVotes(l, m.kv_heads, of_group).all(), kLayerCountBytes);
}

}  // namespace thimble::vulkan
