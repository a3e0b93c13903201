// label: how much the marked rows attend to each cached entry. One dispatch gathers the queries of these
// rows, one sums their logits, one computes the labels.
#include <algorithm>

#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint32_t kVectors = 32, kKeys = 64;  // per workgroup (label.glsl)

// The results of the first dispatch: the marked rows' queries, their number, their indices and their lengths.
struct Gathered {
  uint64_t queries, found;  // in bytes
  Gathered(uint64_t rows, uint32_t heads, uint32_t head_dim)
      : queries(rows * heads * head_dim * sizeof(float)), found((1 + 2 * rows) * sizeof(uint32_t)) {}
};

// Calls record(first tile, tiles) for ranges of tiles that keep a dispatch short enough, if a tile takes at
// most `operations`.
template <typename Record>
void for_tiles(Recording& r, uint64_t tiles, double operations, const Record& record) {
  const auto most =
      std::clamp<uint64_t>(static_cast<uint64_t>(r.most_operations() / operations), 1, r.limits().max_groups);
  for (uint64_t first = 0; first < tiles; first += most) {
    const uint64_t now = std::min(most, tiles - first);
    r.expect(static_cast<double>(now) * operations);
    record(static_cast<uint32_t>(first), static_cast<uint32_t>(now));
  }
}

}  // namespace

uint64_t label_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  if (!s.labels) return 0;
  const Gathered bytes(s.chunk, m.heads, m.head_dim);
  return bytes.queries + bytes.found;
}

void label(Recording& r, const Label& op) {
  const LabelParams& p = op.p;
  const uint32_t rows = r.max_rows();
  const Gathered bytes(rows, p.heads * p.group, p.head_dim);
  const View queries = r.scratch().slice(0, bytes.queries),
             found = r.scratch().slice(bytes.queries, bytes.found);
  const struct {
    LabelParams p;
    uint32_t max_rows;
  } gather{p, rows};
  r.dispatch(Shader::kLabelGather, {op.x ? 1u : 0u},
             {reads(op.q), reads(op.marked), reads(op.rope), reads(op.x), writes(queries), writes(found)},
             gather, rows);

  const uint64_t entry_bytes = kv_bytes(op.k.type, p.head_dim), vectors = uint64_t(rows) * p.group;
  const bool blocks = has_kv_blocks(op.k.type);
  const double keys = static_cast<double>(p.label_capacity) + rows,
               product = 2.0 * p.heads * p.head_dim;  // of a vector and a key, for all heads
  for_run_windows(r.limits(), op.k.values, entry_bytes, [&](const RunWindow& window) {
    struct {
      LabelParams p;
      RunWindow window;
      uint32_t max_rows, first_tile;
    } push{p, window, rows, 0};
    const View k = window.of(op.k.values, entry_bytes);
    for_tiles(r, ceil_div(vectors, kVectors), product * kVectors * keys, [&](uint32_t first, uint32_t tiles) {
      push.first_tile = first;
      r.dispatch(blocks ? Shader::kLabelSumsBlocks : Shader::kLabelSums,
                 {p.head_dim, op.sinks ? 1u : 0u, kv_format_number(op.k.type)},
                 {reads(k), reads(op.chunk_k.values), reads(op.range), reads(queries), reads(found),
                  reads(op.sinks), writes(op.lse)},
                 push, tiles, p.heads);
    });
    for_tiles(r, ceil_div(p.label_capacity, kKeys), product * kKeys * static_cast<double>(vectors),
              [&](uint32_t first, uint32_t tiles) {
                push.first_tile = first;
                r.dispatch(blocks ? Shader::kLabelEntriesBlocks : Shader::kLabelEntries,
                           {p.head_dim, op.worth ? 1u : 0u, kv_format_number(op.k.type)},
                           {reads(k), reads(op.range), reads(queries), reads(found), reads(op.lse),
                            reads(op.worth), writes(op.max_logit), writes(op.log_prob)},
                           push, tiles, p.heads);
              });
  });
}

}  // namespace thimble::vulkan
