// vote and the top_k of its votes, in two dispatches: the workgroups that vote count the keys of what they
// write, so that those that list know about where the threshold is.
#include "backends/vulkan/ops.h"
#include "backends/vulkan/top_k.h"

namespace thimble::vulkan {
namespace {

constexpr uint32_t kSpanWords = 4;  // of top_k.comp's Span

uint64_t counts_bytes(uint32_t heads) { return uint64_t(heads) * kListParts * kVoteBins * sizeof(uint32_t); }
uint64_t spans_bytes(uint32_t heads) { return uint64_t(heads) * kSpanWords * sizeof(uint32_t); }

bool same(const View& a, const View& b) {
  return a.buffer == b.buffer && a.offset == b.offset && a.bytes == b.bytes;
}

}  // namespace

bool lists_votes(const Limits& limits, const Vote& vote, const TopK& list) {
  return vote.p.window <= 1 && list.p.purpose == kTopKSelect && same(list.scores, vote.votes) &&
         same(list.gate, vote.gate) && list.p.heads == vote.p.heads &&
         list.p.score_capacity == vote.p.vote_capacity && takes_one_group(limits, candidates(list));
}

void vote_top_k(Recording& r, const Vote& vote, const TopK& list) {
  const uint32_t heads = vote.p.heads, has_gate = vote.gate ? 1 : 0;
  const View counts = r.scratch().slice(0, counts_bytes(heads)),
             spans = r.scratch().slice(counts.bytes, spans_bytes(heads));
  // As many as there are bins, so that a thread adds up one: at most four votes a thread.
  const uint32_t threads = std::min(kVoteBins, std::bit_floor(r.limits().max_group_threads)),
                 entries = std::min(vote.p.capacity, vote.p.vote_capacity);
  const uint32_t each = static_cast<uint32_t>(ceil_div(entries, kListParts * threads));
  r.dispatch(Shader::kVoteCount, {threads, has_gate, each},
             {reads(vote.scores), reads(vote.lse), reads(vote.pos), reads(vote.gate), writes(vote.votes),
              writes(counts), writes(spans), writes(r.counters().slice(0, heads * sizeof(uint32_t)))},
             vote.p, kListParts, heads);
  const struct {
    TopKParams p;
    uint32_t parts, digit;
  } push{list.p, kListParts, 0};
  r.dispatch(
      Shader::kTopK, {list_threads(r.limits()), has_gate, 0, 1},
      {reads(list.scores), reads({}), reads(list.pos), reads(list.gate), writes(list.list), reads(spans)},
      push, kListParts, heads);
}

uint64_t vote_top_k_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  return s.positions == 0 ? 0 : counts_bytes(m.kv_heads) + spans_bytes(m.kv_heads);
}

}  // namespace thimble::vulkan
