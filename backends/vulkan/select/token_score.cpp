// token_score: every query head scores the middle entries of its KV head; where there are several rows, a
// dispatch before adds up their queries.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"
#include "backends/vulkan/pool_parts.h"

namespace thimble::vulkan {
namespace {

// A chunk's rows are added up in at most this many slices side by side, of 32 rows or more.
constexpr uint32_t kMostSlices = 16, kSliceRows = 32;

uint32_t score_parts(uint32_t capacity) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(ceil_div(capacity, kLeastTile), 1, kMostScoreParts));
}

// What a query head's parts add to its log-sum-exp: [parts]{maximum, sum}.
uint64_t part_bytes(uint32_t parts) { return uint64_t(parts) * 2 * sizeof(float); }

}  // namespace

View score_parts_view(const Recording& r, const TokenScore& op) {
  return r.scratch().slice(0, uint64_t(op.p.heads) * op.p.group * part_bytes(score_parts(op.p.capacity)));
}

void token_score(Recording& r, const TokenScore& op, bool leaves_parts) {
  const TokenScoreParams& p = op.p;
  constexpr uint32_t kThreads = 128;
  const uint32_t queries = p.heads * p.group, channels = queries * p.head_dim,
                 parts = score_parts(p.capacity);
  const HeadPasses passes(p.group);
  const uint32_t has_gate = op.gate ? 1 : 0;
  const View all_parts = score_parts_view(r, op);

  // The only row is rotated where it scores; several are added up first.
  const uint32_t slices =
      r.most_rows() == 1 ? 0 : std::min<uint32_t>(kMostSlices, ceil_div(r.most_rows(), kSliceRows));
  View sums;
  if (slices) {
    sums = r.scratch().slice(all_parts.bytes, uint64_t(slices) * channels * sizeof(float));
    struct {
      TokenScoreParams p;
      uint32_t slices;
    } push{p, slices};
    r.dispatch(Shader::kSumQueries, {has_gate}, {reads(op.q), reads(op.rope), reads(op.gate), writes(sums)},
               push, static_cast<uint32_t>(ceil_div(channels, kThreads)), slices);
  }

  const uint64_t head_bytes = uint64_t(p.capacity) * p.head_dim * sizeof(uint16_t);
  const bool aligned = p.head_dim % 8 == 0 && op.k.offset % 16 == 0;
  for_head_ranges(r.limits(), head_bytes, p.first_head, p.heads, [&](uint32_t first, uint32_t heads) {
    const uint32_t before = (first - p.first_head) * p.group;
    struct {
      TokenScoreParams p;
      uint32_t slices, first_sum, sum_stride;
    } push{p, slices, before * p.head_dim, channels};
    push.p.first_head = first;
    push.p.heads = heads;
    r.dispatch(Shader::kTokenScore,
               {p.head_dim, passes.heads, has_gate, slices ? 1u : 0u, aligned ? 1u : 0u, p.rope.mode,
                p.rope.pairing, p.rope.n_rot, r.limits().subgroup_size, leaves_parts},
               {reads(op.q), reads(sums), reads(of_heads(op.k, head_bytes, first, heads)), reads(op.rope),
                reads(op.gate), writes(op.scores),
                writes(of_heads(all_parts, p.group * part_bytes(parts), first - p.first_head, heads)),
                writes(of_heads(r.counters(), passes.count * sizeof(uint32_t), first - p.first_head, heads)),
                writes(op.lse)},
               push, passes.count, parts, heads);
  });
}

uint64_t token_score_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  if (s.positions == 0) return 0;
  return m.heads * part_bytes(score_parts(s.pool_capacity)) +
         uint64_t(kMostSlices) * m.heads * m.head_dim * sizeof(float);
}

}  // namespace thimble::vulkan
