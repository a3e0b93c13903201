// attention: records attend_view in prefill and attend_pool in decode.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"
#include "backends/vulkan/pool_parts.h"

namespace thimble::vulkan {
namespace {

// The results that the parts of a head leave for the last of them, for this many query vectors: quads of
// channels, and {maximum, sum}.
struct PartResults {
  uint64_t outs, stats;  // in bytes
  PartResults(uint64_t vectors, uint32_t head_dim)
      : outs(vectors * ceil_div(head_dim, 4) * 4 * sizeof(float)), stats(vectors * 2 * sizeof(float)) {}
  uint64_t all() const { return outs + stats; }
};

// Queries per workgroup, and keys per tile.
struct ViewTile {
  uint32_t rows, keys;
  // Shared memory, in units of 16 bytes, as attend_view.comp lays it out; `stride` is that of a query or key.
  uint64_t words(uint64_t stride) const {
    const uint64_t row_quads = std::max(rows / 4, 8u), is_last = 1;
    return (rows + keys) * stride + 16 * (row_quads + 1) + 2 * row_quads + is_last;
  }
};
constexpr ViewTile kSmallestTile{8, 16};
// The largest tile that fits shared memory. 64 rows pay if a workgroup can fill them. They leave each thread
// enough registers for its part of the output up to 128 channels, except on devices with narrow subgroups,
// which have few registers.
ViewTile view_tile(const Limits& limits, uint32_t head_dim, uint64_t queries) {
  const uint64_t stride = ceil_div(head_dim, 8) + 1;
  for (const ViewTile tile : {ViewTile{64, 64}, ViewTile{64, 32}, ViewTile{32, 32}, ViewTile{32, 16}}) {
    const bool wide = head_dim <= 128 && queries > 32 && limits.subgroup_size >= 16;
    if (tile.words(stride) * 16 <= limits.max_shared_bytes && (tile.rows < 64 || wide)) return tile;
  }
  return kSmallestTile;
}

// The tile of attend_view_cooperative.comp: subgroups with 16 queries each. Four fit 48 KiB of shared memory
// with their keys and scores. With large heads, whose matrices take twice a lane's registers, there are two.
struct CooperativeTile {
  static constexpr uint32_t kKeys = 64, kMostHeadDim = 256;
  uint32_t subgroups, threads, rows;
  CooperativeTile(const Limits& limits, uint32_t head_dim)
      : subgroups(head_dim <= 128 ? 4 : 2), threads(subgroups * limits.subgroup_size), rows(16 * subgroups) {}
  bool fits(const Limits& limits, uint32_t head_dim) const {
    const uint64_t is_last = 1,
                   units = std::max(kKeys, rows) * (head_dim / 8 + 1) + rows * (kKeys / 4 + 1) + is_last;
    return head_dim % 16 == 0 && head_dim <= kMostHeadDim && limits.subgroup_size >= 16 &&
           threads <= limits.max_group_threads && units * 16 <= limits.max_shared_bytes;
  }
};

// Attention to the view has a column of workgroups for each head, and spare columns for further parts of
// heads with more keys than others (attend_view_parts.glsl). With heads - 1 spare columns, a head that has
// nearly all the keys can be divided into as many parts as there are heads. If columns have many workgroups,
// fewer spare ones keep a card busy: the largest card runs about kSpareGroups at once.
constexpr uint32_t kSpareGroups = 512, kMostViewRows = 64;  // kMostViewRows: per workgroup
static_assert(kSpareGroups * sizeof(uint32_t) <= Recording::kCounterBytes);
uint32_t spare_columns(uint32_t heads, uint32_t groups) { return std::min(heads - 1, kSpareGroups / groups); }

// The array that contains the values.
const View& values_of(const Attention& op) { return op.v ? op.v.values : op.k.values; }

void attend_view(Recording& r, const Attention& op) {
  const AttentionParams& p = op.p;
  const Limits& limits = r.limits();
  const uint64_t queries = uint64_t(r.most_rows()) * p.group;
  const View &k = op.k.values, &v = values_of(op);
  const uint32_t first_value = p.head_dim - op.value_cols();
  const uint64_t head_bytes = uint64_t(p.view_capacity) * p.head_dim * sizeof(uint16_t);
  const double head_operations = 4.0 * static_cast<double>(queries) * p.view_capacity * p.head_dim;
  const uint32_t has_list = op.list ? 1 : 0, caps = p.cap != 0, has_sinks = op.sinks ? 1 : 0,
                 has_indices = op.row_index ? 1 : 0;
  const bool aligned =
      p.head_dim % 8 == 0 && first_value % 8 == 0 && k.offset % 16 == 0 && v.offset % 16 == 0;
  const ViewTile tile = view_tile(limits, p.head_dim, queries);
  const CooperativeTile matrices(limits, p.head_dim);
  const bool cooperative = limits.cooperative_matrix && aligned && op.v && matrices.fits(limits, p.head_dim);
  const auto record = [&](uint32_t first, uint32_t heads) {
    struct {
      AttentionParams p;
      uint32_t query_heads;
    } push{p, (p.first_head + p.heads) * p.group};
    push.p.first_head = first;
    push.p.heads = heads;
    const auto dispatch = [&](Shader shader, std::initializer_list<uint32_t> constants, uint32_t rows) {
      const uint32_t groups = static_cast<uint32_t>(ceil_div(queries, rows)),
                     spare = p.equal_heads ? 0 : spare_columns(heads, groups);
      const PartResults bytes(uint64_t(spare) * groups * rows, p.head_dim);
      const View outs = r.scratch().slice(0, bytes.outs), stats = r.scratch().slice(outs.bytes, bytes.stats),
                 counters = r.counters().slice(0, uint64_t(spare) * groups * sizeof(uint32_t));
      r.expect(heads * head_operations);
      r.dispatch(shader, constants,
                 {reads(op.q), reads(of_heads(k, head_bytes, first, heads)),
                  reads(of_heads(v, head_bytes, first, heads)), reads(op.list), reads(op.rope), writes(op.y),
                  writes(op.ml), writes(outs), writes(stats), writes(counters), reads(op.sinks),
                  reads(op.row_index)},
                 push, heads + spare, groups);
    };
    if (cooperative)
      dispatch(Shader::kAttendViewCooperative,
               {matrices.threads, p.head_dim, matrices.subgroups, has_list, p.equal_heads, caps, has_sinks,
                has_indices},
               matrices.rows);
    else
      dispatch(Shader::kAttendView,
               {p.head_dim, tile.rows, tile.keys, has_list, aligned ? 1u : 0u, limits.subgroup_size,
                p.equal_heads, caps, has_sinks, has_indices, first_value},
               tile.rows);
  };
  for_head_ranges(limits, head_bytes, p.first_head, p.heads, record,
                  static_cast<uint64_t>(r.most_operations() / head_operations));
}

// The division of attend_pool.comp: the threads of a workgroup attend to a tile of a fourth as many entries
// at a time. `entries`: per head, if heads are equal.
struct PoolWork {
  uint32_t threads, parts;
  bool once;  // with equal heads, no part has more than one tile
  HeadPasses passes;

  PoolWork(uint32_t entries, const HeadPasses& heads, uint32_t n)
      : threads(n),
        parts(static_cast<uint32_t>(std::min<uint64_t>(kMostParts, ceil_div(entries, n / 4)))),
        once(entries <= kMostParts * (n / 4)),
        passes(heads) {}
  uint64_t shared_bytes(uint32_t head_dim) const {
    const uint64_t heads = passes.heads, units = ceil_div(head_dim, 8),
                   scoring = heads * 2 * units + heads * threads / 2,
                   adding = std::min<uint64_t>(heads, 4) * threads, weights = kMostParts * ceil_div(heads, 4),
                   entries = threads / 8, few = 4;
    return 16 * (std::max(scoring, adding) + weights + entries + few);
  }
};
// If no part has more than one tile, the tile is large, because that halves the number of parts to combine.
// If a part's next tiles are prefetched, registers are scarce, and small workgroups leave fewer of them
// unused. A tile has at most 64 entries, because keys rotate by their index in it.
PoolWork pool_work(const Limits& limits, const AttentionParams& p, uint32_t entries) {
  const PoolWork large(entries, HeadPasses(p.group), 256);
  if (large.once && limits.max_group_threads >= 256 &&
      large.shared_bytes(p.head_dim) <= limits.max_shared_bytes)
    return large;
  for (uint32_t heads = kMostHeads; heads > 1; heads /= 2) {
    const PoolWork work(entries, HeadPasses(p.group, heads), 128);
    if (work.shared_bytes(p.head_dim) <= limits.max_shared_bytes) return work;
  }
  return {entries, HeadPasses(p.group, 1), 128};
}

void attend_pool(Recording& r, const Attention& op) {
  AttentionParams p = op.p;
  if (!op.list) p.list_capacity = 0;  // tells the shader
  const Limits& limits = r.limits();
  const View &k = op.k.values, &v = values_of(op);
  const uint32_t first_value = p.head_dim - op.value_cols();
  uint32_t entries = mean_entries(op.k, p.head_dim, p.first_head + p.heads);
  if (op.list) entries = std::min(entries, p.list_capacity - 1);
  if (p.window) entries = std::min(entries, p.window);
  const PoolWork work = pool_work(limits, p, entries);
  const bool blocks = has_kv_blocks(op.k, op.v);
  // first_value is 0 or n_rot. Blocks are read word by word, and eight pairs at a time.
  const bool aligned_rows =
      blocks ? p.rope.n_rot % 16 == 0
             : p.head_dim % 8 == 0 && p.rope.n_rot % 8 == 0 && k.offset % 8 == 0 && v.offset % 8 == 0;
  const bool aligned = aligned_rows && op.rope.offset % 16 == 0;
  const PartResults bytes(uint64_t(work.parts) * p.heads * p.group, p.head_dim);
  const View outs = r.scratch().slice(0, bytes.outs), stats = r.scratch().slice(outs.bytes, bytes.stats),
             counters = r.counters().slice(0, uint64_t(work.passes.count) * p.heads * sizeof(uint32_t));
  const uint64_t k_bytes = kv_bytes(op.k.type, p.head_dim),
                 v_bytes = op.v ? kv_bytes(op.v.type, p.head_dim) : k_bytes;
  const Shader shader = op.sinks ? (blocks ? Shader::kAttendPoolSinksBlocks : Shader::kAttendPoolSinks)
                                 : (blocks ? Shader::kAttendPoolBlocks : Shader::kAttendPool);
  for_run_windows(limits, op.k, op.v, p.head_dim, [&](const RunWindow& window) {
    const struct {
      AttentionParams p;
      RunWindow window;
    } push{p, window};
    r.dispatch(shader,
               {p.head_dim, work.passes.heads, p.rope.mode, p.rope.pairing, p.rope.n_rot, aligned ? 1u : 0u,
                work.once ? 1u : 0u, work.threads, limits.subgroup_size, p.equal_heads, p.cap != 0,
                kv_format_number(op.k.type), first_value, kv_format_number(op.v.type)},
               {reads(op.q), reads(window.of(k, k_bytes)), reads(window.of(v, v_bytes)), reads(op.list),
                reads(op.rope), writes(outs), writes(stats), writes(counters), writes(op.y), reads(op.sinks)},
               push, work.parts, p.heads, work.passes.count);
  });
}

}  // namespace

void attention(Recording& r, const Attention& op) {
  if (op.p.source == kFromView)
    attend_view(r, op);
  else
    attend_pool(r, op);
}

uint32_t most_head_dim(const Limits& limits) {
  constexpr uint32_t kMost = 576;  // tested
  uint32_t dim = kMost;
  while (dim && kSmallestTile.words(ceil_div(dim, 8) + 1) * 16 > limits.max_shared_bytes) dim -= 8;
  return dim;
}

uint64_t attention_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  if (!m.kv_heads) return 0;
  const uint64_t parts = std::min<uint64_t>(uint64_t(kMostParts) * m.kv_heads,
                                            ceil_div(s.layer_entries, kLeastTile) + m.kv_heads);
  const uint64_t group = ceil_div(m.heads, m.kv_heads),
                 spare = (m.kv_heads - 1) * round_up(s.chunk * group, kMostViewRows),
                 most_spare = uint64_t(kSpareGroups) * kMostViewRows;
  return PartResults(std::max(parts * group, std::min(spare, most_spare)), m.head_dim).all();
}

}  // namespace thimble::vulkan
