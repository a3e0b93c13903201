// kv_view: copies a list's entries of pool and chunk into rows of floats, with keys rotated by list index.
#include <algorithm>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_scratch.h"
#include "backends/cpu/rope.h"

namespace thimble::cpu {

constexpr uint32_t kBlock = 64;  // list entries per item

void kv_view(const Context& ctx, const KvView& o) {
  const KvViewParams& p = o.p;
  const Rope rope(o.rope, p.rope);
  const KvRows pool_k(o.pool_k, p.head_dim), pool_v(o.pool_v, p.head_dim), chunk_k(o.chunk_k, p.head_dim),
      chunk_v(o.chunk_v, p.head_dim);
  const uint32_t blocks = static_cast<uint32_t>(ceil_div(p.view_capacity, kBlock));
  for_share(ctx, blocks, [&](uint32_t block, uint32_t worker) {
    const RowScratch scratch = worker_scratch<RowScratch>(ctx.scratch.data(), worker, p.head_dim);
    const uint32_t end = std::min((block + 1) * kBlock, p.view_capacity);
    for (uint32_t row = block * kBlock; row < end; ++row) {
      const uint32_t index = p.first_entry + row;
      bool ready = false;
      for (uint32_t head = p.first_head; head < p.first_head + p.heads; ++head) {
        const EntryList list = entry_list(ctx, o.list, head, p.list_capacity, p.head_state);
        if (index >= list.count) continue;
        const HeadState& state = ctx.heads[p.head_state + head];
        const uint32_t entry = list[index], n = state.n_entries;
        const auto load = [&](const KvRows& pool, const KvRows& chunk, float* to) {
          const KvRows& rows = entry < n ? pool : chunk;
          rows.format.load_row(
              entry < n ? rows.in_run(state, entry) : rows.at(head, p.chunk_capacity, entry - n), to,
              p.head_dim);
        };
        float* k = at<float>(o.k, head, p.view_capacity, row, p.head_dim);
        load(pool_k, chunk_k, k);
        if (pool_v.first) load(pool_v, chunk_v, at<float>(o.v, head, p.view_capacity, row, p.head_dim));
        if (p.rope.mode != kRopeList) continue;
        if (!ready) rope.angles(index, scratch.angles);
        ready = true;
        rope.rotate(k, scratch.angles);
      }
    }
  });
}

}  // namespace thimble::cpu
