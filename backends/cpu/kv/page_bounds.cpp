// page_bounds: the smallest and the largest key of each page, channel by channel, as halves. They are exact
// if keys are halves, and rounded to the nearest half otherwise.
#include <algorithm>
#include <limits>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_scratch.h"

namespace thimble::cpu {

constexpr float kLargestHalf = 65504;

// Bounds of the n keys of a run from entry `first` on; NaN is ignored.
static void bound(const KvRows& keys, const HeadState& state, uint32_t first, uint32_t n, uint32_t head_dim,
                  const BoundsScratch& t, uint16_t* lowest, uint16_t* highest) {
  const KvKernels& kernels = kv_kernels();
  std::fill_n(t.lowest, head_dim, std::numeric_limits<float>::infinity());
  std::fill_n(t.highest, head_dim, -std::numeric_limits<float>::infinity());
  for (uint32_t i = 0; i < n; ++i) {
    keys.format.load_row(keys.in_run(state, first + i), t.key, head_dim);
    for (uint32_t c = 0; c < head_dim; ++c) {
      const float x = std::clamp(t.key[c], -kLargestHalf, kLargestHalf);  // blocks may go a little beyond
      t.lowest[c] = x < t.lowest[c] ? x : t.lowest[c];
      t.highest[c] = x > t.highest[c] ? x : t.highest[c];
    }
  }
  kernels.narrow(t.lowest, lowest, head_dim);
  kernels.narrow(t.highest, highest, head_dim);
}

void page_bounds(const Context& ctx, const PageBounds& o) {
  const PageBoundsParams& p = o.p;
  struct Pages {
    uint32_t entries, begin, end;
  };
  const KvRows keys(o.k, p.head_dim);
  const auto pages_of = [&](uint32_t head) {
    const HeadState& state = ctx.heads[p.head_state + head];
    const uint32_t n = step_entries(ctx.step, state);
    if (p.all) return Pages{std::min(state.keep, n), 0, units(std::min(state.keep, n), p.page)};
    return Pages{n, state.n_entries / p.page, units(n, p.page)};
  };
  uint32_t most = 0;  // per head; a step without rows may end before the page of entry n_entries
  for (uint32_t head = p.first_head; head < p.first_head + p.heads; ++head) {
    const Pages pages = pages_of(head);
    if (pages.begin < pages.end) most = std::max(most, pages.end - pages.begin);
  }

  ctx.threads.run(p.heads * most, [&](uint32_t item, uint32_t worker) {
    const uint32_t head = p.first_head + item / most;
    const Pages pages = pages_of(head);
    const uint32_t page = pages.begin + item % most;
    if (page >= pages.end) return;
    const HeadState& state = ctx.heads[p.head_state + head];
    uint16_t* lowest = page_of<uint16_t>(o.bounds, state, head, p.page, page, p.head_dim);
    bound(keys, state, page * p.page, std::min(p.page, pages.entries - page * p.page), p.head_dim,
          worker_scratch<BoundsScratch>(ctx.scratch.data(), worker, p.head_dim), lowest, lowest + p.head_dim);
  });
}

}  // namespace thimble::cpu
