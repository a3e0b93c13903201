// query_score: how much weight queries give to entries. A worker turns the keys of a tile of entries once and
// multiplies them with all queries of their KV head: first for the sums of the softmax, then for the weights.
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

// One KV head's queries and entries.
struct HeadWork {
  const Context& ctx;
  const QueryScore& o;
  const uint32_t head;
  const HeadState& state = ctx.heads[o.p.head_state + head];
  const EntryList list = entry_list(ctx, o.list, head, o.p.list_capacity, o.p.head_state);
  const QuerySpan span = query_span(ctx.step, state, o.p, list.count);

  uint32_t vectors() const { return span.rows * o.p.group; }
  // The sums of vector v, as logarithms; once merged the first is that of all.
  float* sums(uint32_t v) const {
    return data<float>(o.sums) + (uint64_t(head) * o.p.rows * o.p.group + v) * kQueryScoreSums;
  }
  float& score(uint32_t entry) const {
    return entry < state.n_entries
               ? *in_run<float>(o.cis, state, entry)
               : *at<float>(o.chunk_cis, head, o.p.chunk_capacity, entry - state.n_entries);
  }

  // Calls each(vector, its logits, how many of them it sees) for a tile of the span.
  template <typename Each>
  void for_vectors(uint32_t tile, std::byte* scratch, uint32_t worker, const Each& each) const {
    const uint32_t rows = attention_rows(o.p.group), width = padded_width(o.p.head_dim);
    const TileScratch t = worker_scratch<TileScratch>(scratch, worker, rows * o.p.group, o.p.head_dim);
    const uint32_t begin = tile * kTileKeys, n = std::min(kTileKeys, span.count - begin);
    read_keys(begin, n, t);
    for (uint32_t first = 0; first < span.rows; first += rows) {
      const uint32_t now = std::min(rows, span.rows - first), count = now * o.p.group;
      for (uint32_t row = 0; row < now; ++row) read_queries(first + row, t.q + row * o.p.group * width, t);
      kv_kernels().multiply_tile(count, o.p.head_dim, t.q, width, t.keys, t.scores);
      if (o.p.cap != 0) kernels().soft_cap(t.scores, count * kTileKeys, o.p.cap);
      for (uint32_t v = 0; v < count; ++v) {
        const uint32_t seen = entries_seen(span, first + v / o.p.group);
        each(first * o.p.group + v, t.scores + v * kTileKeys, seen > begin ? std::min(n, seen - begin) : 0);
      }
    }
  }

 private:
  // The rotated keys of a tile, transposed; 0 behind the n-th.
  void read_keys(uint32_t begin, uint32_t n, const TileScratch& t) const {
    const uint32_t dh = o.p.head_dim;
    const Rope rope(o.rope, o.p.rope);
    if (n < kTileKeys) std::fill_n(t.keys, dh * kTileKeys, 0.0f);
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t index = entry_of(span, begin + i), entry = list[index], pooled = state.n_entries;
      kv_kernels().widen(entry < pooled
                             ? in_run<uint16_t>(o.k.values, state, entry, dh)
                             : at<uint16_t>(o.chunk_k.values, head, o.p.chunk_capacity, entry - pooled, dh),
                         t.rotated, dh);
      if (o.p.rope.mode == kRopeList) {
        rope.angles(index, t.angles);
        rope.rotate(t.rotated, t.angles);
      }
      for (uint32_t c = 0; c < dh; ++c) t.keys[c * kTileKeys + i] = t.rotated[c];
    }
  }

  // A row's rotated and scaled queries.
  void read_queries(uint32_t row, float* q, const TileScratch& t) const {
    const uint32_t dh = o.p.head_dim;
    const Rope rope(o.rope, o.p.rope);
    rope.angles(query_position(ctx.step, span, row, o.p.rope.mode), t.angles);
    const float* from = data<float>(o.q) + uint64_t(row) * o.p.row_stride + head * o.p.group * dh;
    for (uint32_t h = 0; h < o.p.group; ++h, q += padded_width(dh), from += dh) {
      for (uint32_t c = 0; c < dh; ++c) q[c] = from[c] * o.p.scale;
      rope.rotate(q, t.angles);
    }
  }
};

// log(exp(a) + exp(b)).
float add_logs(float a, float b) {
  const float most = std::max(a, b);
  return most == -kInfinity ? most : most + std::log1p(std::exp(std::min(a, b) - most));
}

// The vectors' sums over the tiles [first, end).
void sum_tiles(const HeadWork& w, uint32_t first, uint32_t end, std::byte* scratch, uint32_t worker) {
  for (uint32_t tile = first; tile < end; ++tile)
    w.for_vectors(tile, scratch, worker, [&](uint32_t v, const float* logits, uint32_t seen) {
      const float log_sum = seen ? kv_kernels().log_sum_exp(logits, seen) : -kInfinity;
      float& all = w.sums(v)[first / tiles_of_sum(w.span)];
      all = tile == first ? log_sum : add_logs(all, log_sum);
    });
}

// One sum for each vector, of all tiles and the logit that carries no value.
void merge_sums(const HeadWork& w) {
  if (w.span.count == 0) return;
  const uint32_t sums = units(query_tiles(w.span), tiles_of_sum(w.span));
  for (uint32_t v = 0; v < w.vectors(); ++v) {
    const float* sinks = w.o.sinks ? data<float>(w.o.sinks) + w.head * w.o.p.group : nullptr;
    w.sums(v)[0] =
        add_logs(kv_kernels().log_sum_exp(w.sums(v), sums), sinks ? sinks[v % w.o.p.group] : -kInfinity);
  }
}

// A KV head's scores of the entries in a tile: the largest logarithm of a weight, or the sum of weights.
void score_tile(const HeadWork& w, uint32_t tile, std::byte* scratch, uint32_t worker) {
  const bool largest = w.o.p.kind == kQueryRows;
  std::array<float, kTileKeys> scores;
  scores.fill(largest ? -kInfinity : 0);
  w.for_vectors(tile, scratch, worker, [&](uint32_t v, const float* logits, uint32_t seen) {
    const float sum = w.sums(v)[0];
    for (uint32_t i = 0; i < seen; ++i) {
      const float log_weight = logits[i] - sum;
      if (!(log_weight > -kInfinity)) continue;
      scores[i] = largest ? std::max(scores[i], log_weight) : scores[i] + std::exp(log_weight);
    }
  });
  const uint32_t begin = std::max(tile * kTileKeys, w.span.sinks),
                 end = std::min((tile + 1) * kTileKeys, w.span.sinks + w.span.scored);
  for (uint32_t i = begin; i < end; ++i) w.score(entry_of(w.span, i)) = scores[i % kTileKeys];
}

// The mean over all heads, for all of them; the last entry stays whatever it is worth.
void share_mean(const Context& ctx, const QueryScore& o, uint32_t entry, bool last) {
  float sum = 0;
  for (uint32_t head = 0; head < o.p.heads; ++head) sum += HeadWork{ctx, o, head}.score(entry);
  const float mean = last ? kInfinity : sum / static_cast<float>(o.p.heads * o.p.group);
  for (uint32_t head = 0; head < o.p.heads; ++head) HeadWork{ctx, o, head}.score(entry) = mean;
}

}  // namespace

void query_score(const Context& ctx, const QueryScore& o) {
  const auto head = [&](uint32_t i) { return HeadWork{ctx, o, o.p.first_head + i}; };
  std::byte* const scratch = ctx.scratch.data();
  uint32_t tiles = 0;  // of one head, at most
  for (uint32_t i = 0; i < o.p.heads; ++i) tiles = std::max(tiles, query_tiles(head(i).span));
  ctx.threads.run(o.p.heads * kQueryScoreSums, [&](uint32_t item, uint32_t worker) {
    const HeadWork w = head(item / kQueryScoreSums);
    const uint32_t each = tiles_of_sum(w.span), first = item % kQueryScoreSums * each;
    sum_tiles(w, first, std::min(first + each, query_tiles(w.span)), scratch, worker);
  });
  ctx.threads.run(o.p.heads, [&](uint32_t i, uint32_t) { merge_sums(head(i)); });
  ctx.threads.run(o.p.heads * tiles, [&](uint32_t item, uint32_t worker) {
    const HeadWork w = head(item / tiles);
    if (item % tiles * kTileKeys < w.span.sinks + w.span.scored) score_tile(w, item % tiles, scratch, worker);
  });
  if (o.p.kind != kQueryLast) return;
  const uint32_t count = head(0).span.count;
  ctx.threads.run(tiles, [&](uint32_t tile, uint32_t) {
    for (uint32_t i = tile * kTileKeys; i < std::min(count, (tile + 1) * kTileKeys); ++i)
      share_mean(ctx, o, i, i + 1 == count);
  });
}

}  // namespace thimble::cpu
