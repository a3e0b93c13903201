// label: how much the marked rows attend to each cached entry, as logits and as log-probabilities.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "backends/cpu/entries.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/kv_scratch.h"
#include "backends/cpu/rope.h"

namespace thimble::cpu {

constexpr uint32_t kTiles = 8;  // tiles per item: 512 keys

// The query vectors of the marked rows in a block, [marked][group].
struct MarkedRows {
  uint32_t first, end;  // row range of the block
  uint32_t count = 0;   // number of vectors

  // Writes the rotated and scaled queries to t.q, and calls each(row, h, vector).
  template <typename Each>
  MarkedRows(const Context& ctx, const Label& o, uint32_t head, uint32_t block, const TileScratch& t,
             const Each& each) {
    const LabelParams& p = o.p;
    const Rope rope(o.rope, p.rope);
    const uint32_t width = padded_width(p.head_dim), rows = attention_rows(p.group);
    first = block * rows;
    end = std::min(first + rows, ctx.step.n_rows);
    for (uint32_t row = first; row < end; ++row) {
      if (!data<uint32_t>(o.marked)[row]) continue;
      rope.angles(static_cast<uint32_t>(ctx.step.position) + row, t.angles);
      const float* from = data<float>(o.q) + uint64_t(row) * p.row_stride + head * p.group * p.head_dim;
      for (uint32_t h = 0; h < p.group; ++h, from += p.head_dim, ++count) {
        float* q = t.q + uint64_t(count) * width;
        for (uint32_t c = 0; c < p.head_dim; ++c) q[c] = from[c] * p.scale;
        rope.rotate_query(q, t.angles, p.head_dim);
        each(row, h, count);
      }
    }
  }
};

// log(exp(a) + exp(b)).
static float add_logs(float a, float b) {
  const float most = std::max(a, b);
  return most == -std::numeric_limits<float>::infinity() ? most
                                                         : most + std::log1p(std::exp(std::min(a, b) - most));
}

// Ranges of the pool's entries: the sinks [0, sinks), the labelled entries [first, end), and those from `own`
// on.
struct Range {
  uint32_t sinks, first, end, own;
  Range(const Label& o, const HeadState& state) {
    const uint32_t* range = data<uint32_t>(o.range);
    own = std::min(range[3], state.n_entries);
    end = std::min({range[2], own, o.p.label_capacity});
    first = std::min(range[1], end);
    sinks = std::min(range[0], first);
  }
};

// log |x| of a row; 0 if the op has no such input.
static float log_length(const Label& o, uint32_t row) {
  if (!o.x) return 0;
  const float* x = data<float>(o.x) + uint64_t(row) * o.p.x_cols;
  return 0.5f * static_cast<float>(std::log(std::inner_product(x, x + o.p.x_cols, x, 0.0)));
}

// Scores the block's vectors against n consecutive keys.
static void score(const Label& o, const KvRows& all, const std::byte* keys, uint32_t n, uint32_t vectors,
                  const TileScratch& t) {
  const std::byte* rows[kTileKeys];
  for (uint32_t i = 0; i < n; ++i) rows[i] = keys + i * all.bytes;
  all.format.load_tile(rows, n, o.p.head_dim, t.keys);
  kv_kernels().multiply_tile(vectors, o.p.head_dim, t.q, padded_width(o.p.head_dim), t.keys, t.scores);
  if (o.p.cap != 0) kernels().soft_cap(t.scores, vectors * kTileKeys, o.p.cap);
}

// The log-sum-exps of one block of rows for one KV head.
static void sum_logits(const Context& ctx, const Label& o, uint32_t head, uint32_t block,
                       const TileScratch& t) {
  const LabelParams& p = o.p;
  const HeadState& state = ctx.heads[p.head_state + head];
  // t.visible: how many entries a vector sees. t.peak: its log-sum-exp so far.
  const MarkedRows marked(ctx, o, head, block, t, [&](uint32_t row, uint32_t h, uint32_t vector) {
    t.visible[vector] = state.n_entries + row + 1;
    t.peak[vector] =
        o.sinks ? data<float>(o.sinks)[head * p.group + h] : -std::numeric_limits<float>::infinity();
  });
  if (marked.count == 0) return;
  const auto add = [&](const KvRows& all, const std::byte* keys, uint32_t first_entry, uint32_t n) {
    score(o, all, keys, n, marked.count, t);
    for (uint32_t v = 0; v < marked.count; ++v)
      if (t.visible[v] > first_entry)
        t.peak[v] = add_logs(t.peak[v], kv_kernels().log_sum_exp(t.scores + v * kTileKeys,
                                                                 std::min(n, t.visible[v] - first_entry)));
  };
  const KvRows pool(o.k, p.head_dim), chunk(o.chunk_k, p.head_dim);
  const Range range(o, state);
  const uint32_t parts[][2] = {{0, range.sinks}, {range.first, range.end}, {range.own, state.n_entries}};
  for (const auto& [first, end] : parts)
    for (uint32_t entry = first; entry < end; entry += kTileKeys)
      add(pool, pool.in_run(state, entry), entry, std::min(kTileKeys, end - entry));
  for (uint32_t row = 0; row < marked.end; row += kTileKeys)
    add(chunk, chunk.at(head, p.chunk_capacity, row), state.n_entries + row,
        std::min(kTileKeys, marked.end - row));
  MarkedRows(ctx, o, head, block, t, [&](uint32_t row, uint32_t h, uint32_t vector) {
    data<float>(o.lse)[uint64_t(row) * p.heads * p.group + head * p.group + h] =
        t.peak[vector] + log_length(o, row);
  });
}

// The labels of entries [first, end) of one KV head.
static void label_entries(const Context& ctx, const Label& o, uint32_t head, uint32_t first, uint32_t end,
                          uint32_t blocks, const TileScratch& t) {
  const LabelParams& p = o.p;
  const HeadState& state = ctx.heads[p.head_state + head];
  const KvRows pool(o.k, p.head_dim);
  for (uint32_t block = 0; block < blocks; ++block) {
    const MarkedRows marked(ctx, o, head, block, t, [&](uint32_t row, uint32_t h, uint32_t vector) {
      t.sum[vector] = data<float>(o.lse)[uint64_t(row) * p.heads * p.group + head * p.group + h];
    });
    if (marked.count == 0) continue;
    for (uint32_t entry = first; entry < end; entry += kTileKeys) {
      const uint32_t n = std::min(kTileKeys, end - entry);
      score(o, pool, pool.in_run(state, entry), n, marked.count, t);
      float* max_logit = at<float>(o.max_logit, head, p.label_capacity, entry);
      float* log_prob = at<float>(o.log_prob, head, p.label_capacity, entry);
      for (uint32_t i = 0; i < n; ++i) {
        max_logit[i] = std::max(max_logit[i], p.least);
        log_prob[i] = std::max(log_prob[i], p.least);
      }
      for (uint32_t v = 0; v < marked.count; ++v) {
        const float* worth = at<float>(o.worth, head * p.group + v % p.group, p.label_capacity, entry);
        for (uint32_t i = 0; i < n; ++i) {
          const float logit = t.scores[v * kTileKeys + i];
          max_logit[i] = std::max(max_logit[i], logit);
          log_prob[i] = std::max(log_prob[i], logit - t.sum[v] + (worth ? worth[i] : 0.0f));
        }
      }
    }
  }
}

void label(const Context& ctx, const Label& o) {
  const LabelParams& p = o.p;
  const uint32_t* marked = data<uint32_t>(o.marked);
  if (std::all_of(marked, marked + ctx.step.n_rows, [](uint32_t m) { return m == 0; })) return;
  const uint32_t rows = attention_rows(p.group);
  const auto blocks = static_cast<uint32_t>(ceil_div(ctx.step.n_rows, rows));
  const auto scratch = [&](uint32_t worker) {
    return worker_scratch<TileScratch>(ctx.scratch.data(), worker, rows * p.group, p.head_dim);
  };
  ctx.threads.run(p.heads * blocks, [&](uint32_t item, uint32_t worker) {
    sum_logits(ctx, o, item % p.heads, item / p.heads, scratch(worker));
  });
  const auto range_of = [&](uint32_t head) { return Range(o, ctx.heads[p.head_state + head]); };
  uint32_t most = 0;
  for (uint32_t head = 0; head < p.heads; ++head)
    most = std::max(most, range_of(head).end - range_of(head).first);
  constexpr uint32_t kKeys = kTiles * kTileKeys;
  const auto items = static_cast<uint32_t>(ceil_div(most, kKeys));
  ctx.threads.run(p.heads * items, [&](uint32_t item, uint32_t worker) {
    const uint32_t head = item / items;
    const Range range = range_of(head);
    const uint32_t first = range.first + item % items * kKeys, end = std::min(range.end, first + kKeys);
    if (first < end) label_entries(ctx, o, head, first, end, blocks, scratch(worker));
  });
}

}  // namespace thimble::cpu
