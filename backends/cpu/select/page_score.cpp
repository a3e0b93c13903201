// page_score: each query head scores the middle pages of its KV head by the largest logit that a key within
// the page's bounds can have.
#include <algorithm>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_scratch.h"
#include "backends/cpu/rope.h"
#include "backends/cpu/select/scores.h"

namespace thimble::cpu {

constexpr uint32_t kTiles = 8;  // tiles per item: 512 pages

void page_score(const Context& ctx, const PageScore& o) {
  const PageScoreParams& p = o.p;
  const Rope rope(o.rope, p.rope);
  const KvKernels& kernels = kv_kernels();
  const KvFormat& halves = *kv_format(DType::kF16);
  const uint32_t width = padded_width(p.head_dim), begin = ctx.step.n_init;
  const uint32_t first_query = p.first_head * p.group, queries = p.heads * p.group;
  ScratchLayout layout(ctx.scratch.data());
  const QueryScratch shared(layout, queries, p.head_dim);
  std::byte* const tiles = ctx.scratch.data() + layout.used();

  const auto end_of = [&](uint32_t head) {
    return scored_end(ctx.step, ctx.heads[p.head_state + p.first_head + head], p.page);
  };
  uint32_t last = begin;
  for (uint32_t head = 0; head < p.heads; ++head) last = std::max(last, end_of(head));
  if (last == begin) return;

  ctx.threads.run(queries, [&](uint32_t query, uint32_t worker) {
    const PageScratch t = worker_scratch<PageScratch>(tiles, worker, p.group, p.head_dim);
    const float* from = data<float>(o.q) + uint64_t(first_query + query) * p.head_dim;
    float* q = shared.q + uint64_t(query) * width;
    for (uint32_t c = 0; c < p.head_dim; ++c) q[c] = from[c] * p.scale;
    if (p.rope.mode == kRopeOriginal) {
      rope.angles(static_cast<uint32_t>(ctx.step.position), t.angles);
      rope.rotate(q, t.angles);
    }
    rope.weigh(q, p.head_dim);
  });

  const uint32_t items = static_cast<uint32_t>(ceil_div(last - begin, kTiles * kTileKeys));
  ctx.threads.run(p.heads * items, [&](uint32_t item, uint32_t worker) {
    const PageScratch t = worker_scratch<PageScratch>(tiles, worker, p.group, p.head_dim);
    const uint32_t head = item / items, first = begin + item % items * kTiles * kTileKeys;
    const uint32_t end = std::min(end_of(head), first + kTiles * kTileKeys);
    const HeadState& state = ctx.heads[p.head_state + p.first_head + head];
    const float* q = shared.q + uint64_t(head) * p.group * width;
    for (uint32_t page = first; page < end; page += kTileKeys) {
      const uint32_t n = std::min(kTileKeys, end - page);
      const std::byte *lowest[kTileKeys], *highest[kTileKeys];
      for (uint32_t i = 0; i < n; ++i) {
        const uint16_t* bounds =
            page_of<uint16_t>(o.bounds, state, p.first_head + head, p.page, page + i, p.head_dim);
        lowest[i] = reinterpret_cast<const std::byte*>(bounds);
        highest[i] = reinterpret_cast<const std::byte*>(bounds + p.head_dim);
      }
      halves.load_tile(lowest, n, p.head_dim, t.lowest);
      halves.load_tile(highest, n, p.head_dim, t.highest);
      kernels.bound_tile(p.group, p.head_dim, q, width, t.lowest, t.highest, t.scores);
      store_tile(o, head, page, t.scores, n);
    }
  });

  sum_scores(ctx, o, begin, end_of);
}

}  // namespace thimble::cpu
