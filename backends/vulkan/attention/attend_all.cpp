// attend_all: attention to a run, the step's rows and the pages of a store, in parts that are joined.
#include <algorithm>

#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"
#include "backends/vulkan/shaders/attention/attend_all_params.h"

namespace thimble::vulkan {
namespace {

constexpr uint64_t kWord = sizeof(uint32_t);

uint32_t blocks_of(uint64_t rows, uint32_t group) {
  return static_cast<uint32_t>(ceil_div(rows * group, kAllVectors));
}
// Parts of a head's entries, for programs of so many rows: enough workgroups for a large card.
uint32_t parts_of(uint32_t rows, uint32_t heads, uint32_t group) {
  constexpr uint32_t kGroups = 512, kMostParts = 32;
  return std::clamp(kGroups / (heads * blocks_of(rows, group)), 1u, kMostParts);
}

// Arrays in scratch; the shaders say what they have.
struct Sizes {
  uint64_t table, queries, parts;
  Sizes(uint32_t rows, uint32_t heads, uint32_t group, uint32_t head_dim, uint32_t pages)
      : table(uint64_t(heads) * (pages + 1) * 4 * kWord),
        queries(uint64_t(rows) * heads * group * head_dim * kWord),
        parts(uint64_t(rows) * heads * group * parts_of(rows, heads, group) * (head_dim + 2) * kWord) {}
  uint64_t bytes() const { return table + queries + parts; }
};

// What the dispatches share: the arrays in scratch.
struct Scratch {
  View table, queries, parts;
  Scratch(const View& all, const Sizes& s)
      : table(all.slice(0, s.table)),
        queries(all.slice(s.table, s.queries)),
        parts(all.slice(s.table + s.queries, s.parts)) {}
};

void attend_parts(Recording& r, const AttendAll& op, const Scratch& scratch, uint32_t parts) {
  const AttendAllParams& p = op.p;
  const uint64_t run_k = kv_bytes(op.k.type, p.head_dim), run_v = kv_bytes(op.v.type, p.head_dim),
                 chunk_k = p.chunk_capacity * run_k, chunk_v = p.chunk_capacity * run_v,
                 stored = uint64_t(p.rows_stride) * 64;
  const uint32_t blocks = blocks_of(r.most_rows(), p.group), layer_heads = p.first_head + p.heads;
  // The operations of a block: a product of each query with each key, and of each weight with each value.
  const double entries = static_cast<double>(mean_entries(op.k, p.head_dim, layer_heads)) +
                         static_cast<double>(p.page_capacity) * kStoredPage,
               operations = 4.0 * kAllVectors * p.head_dim * entries * p.heads;
  const auto at_once =
      static_cast<uint32_t>(std::clamp(r.most_operations() / operations, 1.0, double(blocks)));
  for_run_windows(r.limits(), op.k, op.v, p.head_dim, [&](const RunWindow& window) {
    for_head_ranges(
        r.limits(), std::max({chunk_k, chunk_v, stored}), p.first_head, p.heads,
        [&](uint32_t first, uint32_t heads) {
          for (uint32_t block = 0; block < blocks; block += at_once) {
            const uint32_t now = std::min(at_once, blocks - block);
            const struct {
              AttendAllPartParams p;
              RunWindow window;
            } push{{.first_head = first,
                    .heads = layer_heads,
                    .group = p.group,
                    .first_block = block,
                    .chunk_capacity = p.chunk_capacity,
                    .head_state = p.head_state,
                    .page_capacity = p.page_capacity,
                    .rows_stride = p.rows_stride,
                    .if_stored = p.if_stored,
                    .cap = p.cap,
                    .rope = p.rope},
                   window};
            r.expect(operations * now);
            r.dispatch(
                Shader::kAttendAll,
                {p.head_dim, op.chunk_k ? 1u : 0u, kv_format_number(op.k.type), kv_format_number(op.v.type),
                 kv_format_number(op.stored_k.type), kv_format_number(op.stored_v.type)},
                {reads(scratch.queries), reads(scratch.table), reads(op.count), reads(op.pos), reads(op.rope),
                 reads(window.of(op.k.values, run_k)), reads(window.of(op.v.values, run_v)),
                 reads(of_heads(op.chunk_k.values, chunk_k, first, heads)),
                 reads(of_heads(op.chunk_v.values, chunk_v, first, heads)),
                 reads(of_heads(op.stored_k.values, stored, first, heads)),
                 reads(of_heads(op.stored_v.values, stored, first, heads)), writes(scratch.parts)},
                push, parts, heads, now);
          }
        });
  });
}

}  // namespace

uint32_t attend_all_shared_bytes(uint32_t head_dim) {
  return (kAllEntries * (head_dim + 1) + kAllVectors * kAllEntries + kAllVectors + 4 * kAllEntries) * kWord;
}

uint64_t attend_all_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  if (!s.stored_pages) return 0;
  const uint32_t group = std::max(1u, m.heads / std::max(1u, m.kv_heads));
  uint64_t most = 0;  // more rows may have fewer parts
  for (uint32_t rows = 1; rows <= s.chunk; ++rows)
    most = std::max(most, Sizes(rows, m.kv_heads, group, m.head_dim, s.stored_pages).bytes());
  return most;
}

void attend_all(Recording& r, const AttendAll& op) {
  const AttendAllParams& p = op.p;
  const uint32_t heads = p.first_head + p.heads, queries = heads * p.group, rows = r.most_rows(),
                 parts = parts_of(rows, heads, p.group);
  const Scratch scratch(r.scratch(), Sizes(rows, heads, p.group, p.head_dim, p.page_capacity));
  r.dispatch(Shader::kAttendAllPages, {},
             {reads(op.pages), reads(op.order), reads(op.count), writes(scratch.table)},
             AttendAllPagesParams{heads, p.page_capacity, p.stored_stride}, heads);
  r.dispatch(Shader::kAttendAllQueries, {},
             {reads(op.q), reads(op.rope), reads(op.count), reads(scratch.table), writes(scratch.queries)},
             AttendAllQueryParams{.heads = heads,
                                  .group = p.group,
                                  .head_dim = p.head_dim,
                                  .row_stride = p.row_stride,
                                  .page_capacity = p.page_capacity,
                                  .head_state = p.head_state,
                                  .scale = p.scale,
                                  .rope = p.rope},
             rows, queries);
  attend_parts(r, op, scratch, parts);
  r.dispatch(Shader::kAttendAllJoin, {p.head_dim, op.sinks ? 1u : 0u},
             {reads(scratch.parts), reads(op.sinks), reads(op.count), writes(op.y)},
             AttendAllJoinParams{heads, parts, p.y_stride, p.if_stored}, rows, queries);
}

}  // namespace thimble::vulkan
