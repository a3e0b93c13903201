// token_score: each query head scores the middle entries of its KV head. If there are several rows, a first
// dispatch sums their queries. page_score does the same with the bounds of pages.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"
#include "backends/vulkan/pool_parts.h"

namespace thimble::vulkan {
namespace {

// The rows of a chunk are added in at most kMostSlices concurrent slices, of kSliceRows rows or more.
constexpr uint32_t kMostSlices = 16, kSliceRows = 32;
constexpr uint32_t kThreads = 128;  // per workgroup

// Parts per head if heads are equal.
uint32_t score_parts(uint64_t entries) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(ceil_div(entries, kLeastTile), 1, kMostScoreParts));
}

// The query heads that a workgroup scores at once. A thread has its units of their queries in registers, so
// there are fewer of wide heads.
HeadPasses passes_of(uint32_t group, uint32_t head_dim) {
  return HeadPasses(group, head_dim <= 256 ? kMostHeads : kMostHeads / 2);
}

// Whether token_score_cooperative.comp is used. Its products have two columns for each of kMostHeads query
// heads. With half as many heads half of the work would be wasted, and token_score.comp is faster.
bool scores_by_matrices(const Limits& limits, uint32_t heads, uint32_t head_dim, bool aligned) {
  const uint32_t lanes = limits.subgroup_size;
  if (!limits.cooperative_matrix || heads <= kMostHeads / 2 || !aligned || head_dim % 16 || head_dim > 256 ||
      lanes < 16 || lanes > 64)
    return false;
  // Units of 16 bytes of shared memory: rows of keys, and products in the space of the queries.
  const uint64_t keys = kThreads / lanes * 16, row = head_dim / 8 + 1, product = 5, few = 80;
  const uint64_t units = keys * row + std::max<uint64_t>(keys * product, kMostHeads * head_dim / 4) + few;
  return units * 16 <= limits.max_shared_bytes;
}

// The number of slices that rows are summed in; 0 for a single row, whose query is rotated by the scoring
// shader.
uint32_t row_slices(const Recording& r) {
  return r.most_rows() == 1 ? 0 : std::min<uint32_t>(kMostSlices, ceil_div(r.most_rows(), kSliceRows));
}

// The counters of the passes over all KV heads.
View counters_of(const Recording& r, const HeadPasses& passes, uint32_t heads) {
  return r.counters().slice(0, uint64_t(passes.count) * heads * sizeof(uint32_t));
}

}  // namespace

uint64_t score_parts_bytes(uint32_t query_heads) {
  return uint64_t(query_heads) * kMostScoreParts * 2 * sizeof(float);
}
uint64_t score_bytes(const Recording& r, const TokenScoreParams& p) {
  const uint32_t queries = p.heads * p.group;
  return score_parts_bytes(queries) + uint64_t(row_slices(r)) * queries * p.head_dim * sizeof(float);
}

void token_score(Recording& r, const TokenScore& op, bool leaves_parts, const View& clears) {
  const TokenScoreParams& p = op.p;
  const uint32_t queries = p.heads * p.group, channels = queries * p.head_dim, has_gate = op.gate ? 1 : 0;
  const HeadPasses passes = passes_of(p.group, p.head_dim);
  const View parts = r.scratch().slice(0, score_parts_bytes(queries));

  const uint32_t slices = row_slices(r);
  View sums;
  if (slices) {
    sums = r.scratch().slice(parts.bytes, score_bytes(r, p) - parts.bytes);
    const struct {
      TokenScoreParams p;
      uint32_t slices;
    } push{p, slices};
    r.dispatch(Shader::kSumQueries, {has_gate}, {reads(op.q), reads(op.rope), reads(op.gate), writes(sums)},
               push, static_cast<uint32_t>(ceil_div(channels, kThreads)), slices);
  }

  const View& k = op.k.values;
  const uint64_t entry_bytes = kv_bytes(op.k.type, p.head_dim);
  const bool blocks = has_kv_blocks(op.k.type),
             aligned = !blocks && p.head_dim % 8 == 0 && k.offset % 16 == 0;
  const Shader shader = blocks ? Shader::kTokenScoreBlocks
                        : scores_by_matrices(r.limits(), passes.heads, p.head_dim, aligned)
                            ? Shader::kTokenScoreCooperative
                            : Shader::kTokenScore;
  for_run_windows(r.limits(), k, entry_bytes, [&](const RunWindow& window) {
    const struct {
      TokenScoreParams p;
      RunWindow window;
      uint32_t slices;
    } push{p, window, slices};
    r.dispatch(shader,
               {p.head_dim, passes.heads, has_gate, slices ? 1u : 0u, aligned ? 1u : 0u, p.rope.mode,
                p.rope.pairing, p.rope.n_rot, r.limits().subgroup_size, leaves_parts, p.equal_heads,
                static_cast<uint32_t>(clears.bytes / sizeof(uint32_t)), kv_format_number(op.k.type)},
               {reads(op.q), reads(sums), reads(window.of(k, entry_bytes)), reads(op.rope), reads(op.gate),
                writes(op.scores), writes(parts), writes(counters_of(r, passes, p.heads)), writes(op.lse),
                writes(clears)},
               push, passes.count, score_parts(mean_entries(op.k, p.head_dim, p.first_head + p.heads)),
               p.heads);
  });
}

void token_score(Recording& r, const TokenScore& op) { token_score(r, op, false, {}); }

void page_score(Recording& r, const PageScore& op) {
  const PageScoreParams& p = op.p;
  const HeadPasses passes = passes_of(p.group, p.head_dim);
  const uint64_t page_bytes = 2 * kv_bytes(DType::kF16, p.head_dim);
  const bool aligned = p.head_dim % 8 == 0 && op.bounds.offset % 16 == 0;
  const struct {
    PageScoreParams p;
    RunWindow window;
    uint32_t slices;
  } push{p, {}, 0};
  r.dispatch(Shader::kPageScore,
             {p.head_dim, passes.heads, 0, 0, aligned ? 1u : 0u, p.rope.mode, p.rope.pairing, p.rope.n_rot,
              r.limits().subgroup_size, 0, 0, 0},
             {reads(op.q), reads({}), reads(op.bounds), reads(op.rope), reads({}), writes(op.scores),
              writes(r.scratch().slice(0, score_parts_bytes(p.heads * p.group))),
              writes(counters_of(r, passes, p.heads)), writes(op.lse), writes({})},
             push, passes.count, score_parts(op.bounds.bytes / page_bytes / (p.first_head + p.heads)),
             p.heads);
}

uint64_t token_score_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  if (s.positions == 0) return 0;
  return score_parts_bytes(m.heads) + uint64_t(kMostSlices) * m.heads * m.head_dim * sizeof(float);
}

}  // namespace thimble::vulkan
