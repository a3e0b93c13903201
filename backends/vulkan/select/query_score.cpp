// query_score: how much attention weight queries give to entries. One dispatch computes sums of weights, one
// merges those of a query, one scores; kQueryLast needs a fourth for the mean over heads. The first and the
// third have one shader for several rows and one for a single row.
#include <algorithm>

#include "backends/regions.h"
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

// Operations over all heads to multiply queries and keys once.
double operations(const Recording& r, const QueryScore& op) {
  const QueryScoreParams& p = op.p;
  const double entries = p.kind == kQueryRows ? p.sinks + 1.5 * r.max_rows()
                                              : mean_entries(op.k, p.head_dim, p.first_head + p.heads);
  const double rows = p.kind == kQueryRows ? r.max_rows() : 1;
  return 2.0 * p.heads * p.group * p.head_dim * rows * entries;
}

}  // namespace

void query_score(Recording& r, const QueryScore& op) {
  const QueryScoreParams& p = op.p;
  const uint32_t lanes = r.limits().subgroup_size, threads = std::max(128u, lanes);
  const View &k = op.k.values, &chunk_k = op.chunk_k.values;
  const uint64_t row = kv_bytes(op.k.type, p.head_dim), chunk = p.chunk_capacity * row;
  const uint32_t has_list = op.list ? 1 : 0, format = kv_format_number(op.k.type);
  const bool blocks = has_kv_blocks(op.k.type);
  const uint64_t sum_bytes = uint64_t(p.rows) * p.group * kQueryScoreSums * sizeof(float);
  const uint32_t vectors = p.rows * p.group, entries = mean_entries(op.k, p.head_dim, p.first_head + p.heads);
  const uint32_t tiles = std::min(units(entries + r.max_rows(), kQueryScoreTile), r.limits().max_groups);
  for_run_windows(r.limits(), k, row, [&](const RunWindow& window) {
    for_head_ranges(
        r.limits(), std::max(chunk, sum_bytes), p.first_head, p.heads, [&](uint32_t first, uint32_t heads) {
          struct {
            QueryScoreParams p;
            RunWindow window;
          } push{p, window};
          push.p.first_head = first;
          push.p.heads = heads;
          const View run = window.of(k, row), rows = of_heads(chunk_k, chunk, first, heads),
                     sums = of_heads(op.sums, sum_bytes, first, heads);
          r.expect(operations(r, op));
          if (p.kind == kQueryRows)
            r.dispatch(blocks ? Shader::kQuerySumBlocks : Shader::kQuerySum, {p.head_dim, format},
                       {reads(op.q), reads(run), reads(rows), reads(op.rope), writes(sums)}, push,
                       kQueryScoreSums, heads);
          else
            r.dispatch(blocks ? Shader::kQueryRowSumBlocks : Shader::kQueryRowSum,
                       {p.head_dim, has_list, format},
                       {reads(op.q), reads(run), reads(rows), reads(op.list), reads(op.rope), writes(sums)},
                       push, kQueryScoreSums, heads);
          r.dispatch(Shader::kQueryMerge, {threads, lanes, op.sinks ? 1u : 0u, has_list},
                     {reads(op.sinks), reads(op.list), writes(sums)}, push,
                     std::min(units(vectors, threads / lanes), r.limits().max_groups), heads);
          r.expect(operations(r, op));
          if (p.kind == kQueryRows)
            r.dispatch(blocks ? Shader::kQueryScoreBlocks : Shader::kQueryScore, {p.head_dim, format},
                       {reads(op.q), reads(run), reads(rows), reads(op.rope), reads(sums), writes(op.cis),
                        writes(op.chunk_cis)},
                       push, tiles, heads);
          else
            r.dispatch(blocks ? Shader::kQueryRowScoreBlocks : Shader::kQueryRowScore,
                       {p.head_dim, has_list, format},
                       {reads(op.q), reads(run), reads(rows), reads(op.list), reads(op.rope), reads(sums),
                        writes(op.cis), writes(op.chunk_cis)},
                       push, tiles, heads);
        });
  });
  if (p.kind == kQueryLast)
    r.dispatch(Shader::kQueryMean, {}, {writes(op.cis), writes(op.chunk_cis)}, p, tiles);
}

}  // namespace thimble::vulkan
