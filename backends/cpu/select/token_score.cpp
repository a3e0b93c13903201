// token_score: each query head scores the middle entries of its KV head as if they were all n_local tokens
// back.
#include <algorithm>
#include <cstring>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_scratch.h"
#include "backends/cpu/rope.h"
#include "backends/cpu/select/scores.h"

namespace thimble::cpu {

constexpr uint32_t kTiles = 8;  // tiles per item: 512 keys

// The query that scores: the mean over the rows of q rotated at n_local + row, times scale. Keys stay
// unrotated, so their distance is n_local + row. Under kRopeOriginal keys are cached rotated; q is then
// rotated at its own position and the scores are the true logits.
static void mean_query(const Context& ctx, const TokenScore& o, uint32_t head, float* mean,
                       const TileScratch& tile) {
  const TokenScoreParams& p = o.p;
  const Rope rope(o.rope, p.rope);
  const uint32_t first =
      p.rope.mode == kRopeList ? ctx.step.n_local : static_cast<uint32_t>(ctx.step.position);
  std::fill_n(mean, p.head_dim, 0.0f);
  for (uint32_t row = 0; row < ctx.step.n_rows; ++row) {
    std::memcpy(tile.q, data<float>(o.q) + uint64_t(row) * p.row_stride + head * p.head_dim,
                p.head_dim * sizeof(float));
    rope.angles(first + row, tile.angles);
    rope.rotate_query(tile.q, tile.angles, p.head_dim);
    for (uint32_t c = 0; c < p.head_dim; ++c) mean[c] += tile.q[c];
  }
  const float factor = p.scale / static_cast<float>(ctx.step.n_rows);
  for (uint32_t c = 0; c < p.head_dim; ++c) mean[c] *= factor;
}

void token_score(const Context& ctx, const TokenScore& o) {
  const TokenScoreParams& p = o.p;
  const uint32_t begin = ctx.step.n_init;
  const auto end_of = [&](uint32_t head) {
    return scored_end(ctx.step, ctx.heads[p.head_state + p.first_head + head], 1);
  };
  uint32_t last = begin;
  for (uint32_t head = 0; head < p.heads; ++head) last = std::max(last, end_of(head));
  if (last == begin || selection_cached(o.gate)) return;
  const KvKernels& kernels = kv_kernels();
  const KvRows keys(o.k, p.head_dim);
  const uint32_t width = padded_width(p.head_dim);
  const uint32_t first_query = p.first_head * p.group, queries = p.heads * p.group;
  ScratchLayout layout(ctx.scratch.data());
  const QueryScratch shared(layout, queries, p.head_dim);
  std::byte* const tiles = ctx.scratch.data() + layout.used();

  ctx.threads.run(queries, [&](uint32_t query, uint32_t worker) {
    mean_query(ctx, o, first_query + query, shared.q + uint64_t(query) * width,
               worker_scratch<TileScratch>(tiles, worker, p.group, p.head_dim));
  });

  const uint32_t items = static_cast<uint32_t>(ceil_div(last - begin, kTiles * kTileKeys));
  ctx.threads.run(p.heads * items, [&](uint32_t item, uint32_t worker) {
    const TileScratch t = worker_scratch<TileScratch>(tiles, worker, p.group, p.head_dim);
    const uint32_t head = item / items, first = begin + item % items * kTiles * kTileKeys;
    const uint32_t end = std::min(end_of(head), first + kTiles * kTileKeys);
    const HeadState& state = ctx.heads[p.head_state + p.first_head + head];
    const float* q = shared.q + uint64_t(head) * p.group * width;
    for (uint32_t entry = first; entry < end; entry += kTileKeys) {
      const uint32_t n = std::min(kTileKeys, end - entry);
      const std::byte* rows[kTileKeys];
      for (uint32_t i = 0; i < n; ++i) rows[i] = keys.in_run(state, entry + i);
      keys.format.load_tile(rows, n, p.head_dim, t.keys);
      kernels.multiply_tile(p.group, p.head_dim, q, width, t.keys, t.scores);
      store_tile(o, head, entry, t.scores, n);
    }
  });

  sum_scores(ctx, o, begin, end_of);
}

}  // namespace thimble::cpu
