// query_score: how much attention weight queries give to entries. For the softmax sums, a worker rotates the
// keys of a tile once and multiplies them with all queries of their KV head. For a single row the
// exponentials are kept and reused for the weights. For more rows they would take too much memory, so keys
// are rotated and multiplied again.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "backends/cpu/entries.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/kv_scratch.h"
#include "backends/cpu/rope.h"

namespace thimble::cpu {
namespace {

static_assert(kQueryScoreTile == kTileKeys);
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The queries and entries of one KV head.
struct HeadWork {
  const Context& ctx;
  const QueryScore& o;
  const uint32_t head;
  const float* low;  // [n_rot][kTileKeys]: cos and sin of each pair for positions 0 to 63
  // For a single row, otherwise null: e^(logit - peak) of each entry, [tiles][group][kTileKeys], and the peak
  // and sum of each tile and query, [tiles][group].
  float* const powers;
  LogSum* const parts;
  const HeadState& state = ctx.heads[o.p.head_state + head];
  const EntryList list = entry_list(ctx, o.list, head, o.p.list_capacity, o.p.head_state);
  const QuerySpan span = query_span(ctx.step, state, o.p, list.count);

  uint32_t vectors() const { return span.rows * o.p.group; }
  // The log-sums of vector v. After merge_sums() the first one is the total.
  float* sums(uint32_t v) const {
    return data<float>(o.sums) + (uint64_t(head) * o.p.rows * o.p.group + v) * kQueryScoreSums;
  }
  float* powers_of(uint32_t tile) const { return powers + uint64_t(tile) * o.p.group * kTileKeys; }
  LogSum* parts_of(uint32_t tile) const { return parts + uint64_t(tile) * o.p.group; }
  float& score(uint32_t entry) const {
    return entry < state.n_entries
               ? *in_run<float>(o.cis, state, entry)
               : *at<float>(o.chunk_cis, head, o.p.chunk_capacity, entry - state.n_entries);
  }

  // Calls each(first vector, count, a scratch with their scores, the logits) for a tile of the span.
  template <typename Each>
  void for_vectors(uint32_t tile, std::byte* scratch, uint32_t worker, const Each& each) const {
    const uint32_t rows = attention_rows(o.p.group), width = padded_width(o.p.head_dim);
    TileScratch t = worker_scratch<TileScratch>(scratch, worker, rows * o.p.group, o.p.head_dim);
    if (powers) t.scores = powers_of(tile);
    read_keys(tile, t);
    for (uint32_t first = 0; first < span.rows; first += rows) {
      const uint32_t now = std::min(rows, span.rows - first), count = now * o.p.group;
      for (uint32_t row = 0; row < now; ++row)
        read_queries(first + row, tile, t.q + row * o.p.group * width, t);
      kv_kernels().multiply_tile(count, o.p.head_dim, t.q, width, t.keys, t.scores);
      if (o.p.cap != 0) kernels().soft_cap(t.scores, count * kTileKeys, o.p.cap);
      each(first * o.p.group, count, t);
    }
  }
  // How many entries of a tile a vector sees.
  uint32_t seen(uint32_t tile, uint32_t vector) const {
    const uint32_t all = entries_seen(span, vector / o.p.group), begin = tile * kTileKeys;
    return all > begin ? std::min(kTileKeys, all - begin) : 0;
  }

 private:
  // Under kRopeList, keys rotate by their index in the tile and queries by the remaining difference. This
  // does not work after sinks, because a tile's entries are then not consecutive.
  bool by_place() const { return o.p.rope.mode == kRopeList && span.sinks == 0; }

  // Loads the rotated keys of a tile, transposed; 0 after the last key.
  void read_keys(uint32_t tile, const TileScratch& t) const {
    const uint32_t dh = o.p.head_dim, begin = tile * kTileKeys, n = std::min(kTileKeys, span.count - begin);
    const Rope rope(o.rope, o.p.rope);
    const KvRows pool(o.k, dh), chunk(o.chunk_k, dh);  // of one format
    const auto key = [&](uint32_t i) {
      const uint32_t entry = list[entry_of(span, i)], pooled = state.n_entries;
      return entry < pooled ? pool.in_run(state, entry) : chunk.at(head, o.p.chunk_capacity, entry - pooled);
    };
    const std::byte* keys[kTileKeys];
    for (uint32_t i = 0; i < n; ++i) keys[i] = key(begin + i);
    for (uint32_t i = begin + n; i < std::min(span.count, begin + 2 * kTileKeys); ++i)
      prefetch_row(key(i), pool.bytes);
    pool.format.load_tile(keys, n, dh, t.keys);
    if (by_place()) return kv_kernels().rotate_tile(t.keys, low, rope.pairs, rope.second, rope.step);
    if (o.p.rope.mode != kRopeList) return;
    for (uint32_t i = 0; i < n; ++i) {
      pool.format.load_row(keys[i], t.rotated, dh);
      rope.angles(entry_of(span, begin + i), t.angles);
      rope.rotate(t.rotated, t.angles);
      for (uint32_t c = 0; c < dh; ++c) t.keys[c * kTileKeys + i] = t.rotated[c];
    }
  }

  // Writes a row's queries, rotated and scaled for a tile.
  void read_queries(uint32_t row, uint32_t tile, float* q, const TileScratch& t) const {
    const uint32_t dh = o.p.head_dim;
    const Rope rope(o.rope, o.p.rope);
    uint32_t position = query_position(ctx.step, span, row, o.p.rope.mode);
    const uint32_t begin = by_place() ? std::min(position, entry_of(span, tile * kTileKeys)) : 0;
    // Queries with weights rotate to their position first, and back by that of the tile.
    const bool back = by_place() && rope.query_weight;
    if (!back) position -= begin;
    rope.angles(position, t.angles);
    if (by_place() &&
        !back)  // the low half of the table, used for the keys, lacks the model's attention factor
      for (uint32_t i = 0; i < o.p.rope.n_rot; ++i) t.angles[i] *= rope.factor();
    const float* from = data<float>(o.q) + uint64_t(row) * o.p.row_stride + head * o.p.group * dh;
    for (uint32_t h = 0; h < o.p.group; ++h, q += padded_width(dh), from += dh) {
      for (uint32_t c = 0; c < dh; ++c) q[c] = from[c] * o.p.scale;
      rope.rotate_query(q, t.angles, dh);
    }
    if (!back) return;
    rope.angles(begin, t.angles);
    rope.invert(t.angles);
    for (uint32_t h = 0; h < o.p.group; ++h) {
      q -= padded_width(dh);
      rope.rotate(q, t.angles);
    }
  }
};

// log(exp(a) + exp(b)).
float add_logs(float a, float b) {
  const float most = std::max(a, b);
  return most == -kInfinity ? most : most + std::log1p(std::exp(std::min(a, b) - most));
}

// The vectors' log-sums over tiles [first, end).
void sum_tiles(const HeadWork& w, uint32_t first, uint32_t end, std::byte* scratch, uint32_t worker) {
  for (uint32_t tile = first; tile < end; ++tile)
    w.for_vectors(tile, scratch, worker, [&](uint32_t vector, uint32_t count, const TileScratch& t) {
      for (uint32_t v = 0; v < count; ++v) {
        const uint32_t seen = w.seen(tile, vector + v);
        const float log_sum = seen ? kv_kernels().log_sum_exp(t.scores + v * kTileKeys, seen) : -kInfinity;
        float& all = w.sums(vector + v)[first / tiles_of_sum(w.span)];
        all = tile == first ? log_sum : add_logs(all, log_sum);
      }
    });
}

// The same for a single row, tile by tile.
void take_powers(const HeadWork& w, uint32_t first, uint32_t end, std::byte* scratch, uint32_t worker) {
  for (uint32_t tile = first; tile < end; ++tile)
    w.for_vectors(tile, scratch, worker, [&](uint32_t, uint32_t count, const TileScratch& t) {
      for (uint32_t v = 0; v < count; ++v) {
        LogSum& part = w.parts_of(tile)[v];
        part.sum = kv_kernels().exponentials(t.scores + v * kTileKeys, w.seen(tile, v), &part.peak);
      }
    });
}

// The logarithm of the sum over all tiles for vector v of a single row.
float log_sum(const HeadWork& w, uint32_t v) {
  const uint32_t tiles = query_tiles(w.span);
  float peak = -kInfinity;
  for (uint32_t tile = 0; tile < tiles; ++tile) peak = std::max(peak, w.parts_of(tile)[v].peak);
  if (peak == -kInfinity) return peak;
  double sum = 0;
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    const LogSum part = w.parts_of(tile)[v];
    sum += part.sum * std::exp(part.peak - peak);
  }
  return peak + static_cast<float>(std::log(sum));
}

// Merges the sums of each vector over all tiles and the sink's logit.
void merge_sums(const HeadWork& w) {
  if (w.span.count == 0) return;
  const uint32_t sums = units(query_tiles(w.span), tiles_of_sum(w.span));
  const float* sinks = w.o.sinks ? data<float>(w.o.sinks) + w.head * w.o.p.group : nullptr;
  for (uint32_t v = 0; v < w.vectors(); ++v)
    w.sums(v)[0] = add_logs(w.parts ? log_sum(w, v) : kv_kernels().log_sum_exp(w.sums(v), sums),
                            sinks ? sinks[v % w.o.p.group] : -kInfinity);
}

// The largest logarithm of a weight for each entry of a tile.
void largest_weights(const HeadWork& w, uint32_t tile, std::byte* scratch, uint32_t worker, float* scores) {
  std::fill_n(scores, kTileKeys, -kInfinity);
  w.for_vectors(tile, scratch, worker, [&](uint32_t vector, uint32_t count, const TileScratch& t) {
    for (uint32_t v = 0; v < count; ++v) {
      const uint32_t seen = w.seen(tile, vector + v);
      const float sum = w.sums(vector + v)[0];
      for (uint32_t i = 0; i < seen; ++i)
        scores[i] = std::max(scores[i], t.scores[v * kTileKeys + i] - sum);  // NaN keeps the previous value
    }
  });
}

// The sums of a single row's weights; the row sees all entries of the tile.
void summed_weights(const HeadWork& w, uint32_t tile, std::byte* scratch, uint32_t worker, float* scores) {
  const uint32_t group = w.o.p.group, vectors = attention_rows(group) * group;
  float* const factors = worker_scratch<TileScratch>(scratch, worker, vectors, w.o.p.head_dim).sum;
  for (uint32_t v = 0; v < group; ++v) {
    const float log = w.parts_of(tile)[v].peak - w.sums(v)[0];
    factors[v] = std::isnan(log) ? 0 : std::exp(log);
  }
  kv_kernels().multiply_tile(1, group, factors, group, w.powers_of(tile), scores);
}

// The scores of the entries in a tile for one KV head.
void score_tile(const HeadWork& w, uint32_t tile, std::byte* scratch, uint32_t worker) {
  std::array<float, kTileKeys> scores;
  if (w.o.p.kind == kQueryRows)
    largest_weights(w, tile, scratch, worker, scores.data());
  else
    summed_weights(w, tile, scratch, worker, scores.data());
  const uint32_t begin = std::max(tile * kTileKeys, w.span.sinks),
                 end = std::min((tile + 1) * kTileKeys, w.span.sinks + w.span.scored);
  for (uint32_t i = begin; i < end; ++i) w.score(entry_of(w.span, i)) = scores[i % kTileKeys];
}

// Replaces the scores of all heads by their mean; the last entry is always kept.
template <typename Head>
void share_mean(const Head& head, const QueryScore& o, uint32_t entry, bool last) {
  float sum = 0;
  for (uint32_t i = 0; i < o.p.heads; ++i) sum += head(i).score(entry);
  const float mean = last ? kInfinity : sum / static_cast<float>(o.p.heads * o.p.group);
  for (uint32_t i = 0; i < o.p.heads; ++i) head(i).score(entry) = mean;
}

// Scores `count` KV heads from the first on, with at most `tiles` tiles each.
template <typename Head>
void score_heads(const Head& head, uint32_t first, uint32_t count, uint32_t tiles, std::byte* scratch,
                 ThreadPool& threads) {
  threads.run(count * kQueryScoreSums, [&](uint32_t item, uint32_t worker) {
    const HeadWork w = head(first + item / kQueryScoreSums);
    const uint32_t each = tiles_of_sum(w.span), begin = item % kQueryScoreSums * each;
    const auto make = w.powers ? take_powers : sum_tiles;
    make(w, begin, std::min(begin + each, query_tiles(w.span)), scratch, worker);
  });
  threads.run(count, [&](uint32_t i, uint32_t) { merge_sums(head(first + i)); });
  threads.run(count * tiles, [&](uint32_t item, uint32_t worker) {
    const HeadWork w = head(first + item / tiles);
    if (item % tiles * kTileKeys < w.span.sinks + w.span.scored) score_tile(w, item % tiles, scratch, worker);
  });
}

}  // namespace

void query_score(const Context& ctx, const QueryScore& o) {
  const uint32_t group = o.p.group, dh = o.p.head_dim;
  const bool one_row = o.p.kind != kQueryRows;
  uint32_t tiles = 0;  // the most of any head
  for (uint32_t i = 0; i < o.p.heads; ++i)
    tiles =
        std::max(tiles, query_tiles(HeadWork{ctx, o, o.p.first_head + i, nullptr, nullptr, nullptr}.span));
  // Process as many heads at once as there is memory for their powers; needs() guarantees one.
  const uint64_t workers = ctx.threads.size() * scratch_bytes<TileScratch>(attention_rows(group) * group, dh);
  uint32_t at_once = one_row ? 1 : o.p.heads;
  while (at_once < o.p.heads &&
         scratch_bytes<PowerScratch>(at_once + 1, tiles, group, dh) + workers <= ctx.scratch.size())
    ++at_once;
  ScratchLayout layout(ctx.scratch.data());
  const PowerScratch shared(layout, one_row ? at_once : 0, tiles, group, dh);
  if (o.p.rope.mode == kRopeList) transpose_low_half(o.rope, o.p.rope, shared.low);
  const auto head = [&](uint32_t i) {
    const uint32_t first_head = o.p.first_head;
    if (!one_row) return HeadWork{ctx, o, first_head + i, shared.low, nullptr, nullptr};
    const uint64_t parts = uint64_t(i % at_once) * tiles * group;
    return HeadWork{
        ctx, o, first_head + i, shared.low, shared.powers + parts * kTileKeys, shared.parts + parts};
  };
  const uint32_t end = ctx.share.end(o.p.heads);
  for (uint32_t first = ctx.share.begin(o.p.heads); first < end; first += at_once)
    score_heads(head, first, std::min(at_once, end - first), tiles, ctx.scratch.subspan(layout.used()).data(),
                ctx.threads);
  if (o.p.kind != kQueryLast) return;
  const uint32_t count = head(0).span.count;
  ctx.threads.run(tiles, [&](uint32_t tile, uint32_t) {
    for (uint32_t i = tile * kTileKeys; i < std::min(count, (tile + 1) * kTileKeys); ++i)
      share_mean(head, o, i, i + 1 == count);
  });
}

}  // namespace thimble::cpu
