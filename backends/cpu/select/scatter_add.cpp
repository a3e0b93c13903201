// scatter_add: adds the values of heads to positions. An item owns a range of positions and goes through the
// heads, so every sum is made in the same order.
#include <algorithm>

#include "backends/cpu/entries.h"

namespace thimble::cpu {
namespace {

constexpr uint32_t kSlots = 1024;  // positions per item

// Adds the values of one head to positions [first, first + count).
void add_head(const Context& ctx, const ScatterAdd& o, uint32_t head, int64_t first, uint32_t count,
              float* sums) {
  const ScatterAddParams& p = o.p;
  const HeadState& state = ctx.heads[p.head_state + head];
  const EntryList list = entry_list(ctx, o.list, head, p.list_capacity, p.head_state);
  const int32_t* pos = in_run<int32_t>(o.pos, state, 0);
  const float* weights = in_run<float>(o.weights, state, 0);
  uint32_t n = window_begin(p.window, list.count);
  for (uint32_t end = list.count; n < end;) {  // binary search for the first entry at or after `first`
    const uint32_t middle = n + (end - n) / 2;
    if (pos[list[middle]] < first)
      n = middle + 1;
    else
      end = middle;
  }
  for (; n < list.count; ++n) {
    const int64_t slot = pos[list[n]] - first;
    if (slot < 0 || slot >= count) return;
    sums[slot] += weights ? weights[n] : 1;
  }
}

}  // namespace

void scatter_add(const Context& ctx, const ScatterAdd& o) {
  const ScatterAddParams& p = o.p;
  ctx.threads.run(units(p.slots, kSlots), [&](uint32_t item, uint32_t) {
    const uint32_t begin = item * kSlots, count = std::min(p.slots - begin, kSlots);
    float* sums = data<float>(o.sums) + begin;
    if (!p.add) std::fill_n(sums, count, 0.0f);
    for (uint32_t head = p.first_head; head < p.first_head + p.heads; ++head)
      add_head(ctx, o, head, int64_t{ctx.step.position} + begin, count, sums);
  });
}

}  // namespace thimble::cpu
