// kv_spill: copies the entries that a compaction is going to drop.
#include <cstring>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_scratch.h"

namespace thimble::cpu {

void kv_spill(const Context& ctx, const KvSpill& o) {
  const KvSpillParams& p = o.p;
  const KvRows pool_k(o.pool_k, p.head_dim), pool_v(o.pool_v, p.head_dim), chunk_k(o.chunk_k, p.head_dim),
      chunk_v(o.chunk_v, p.head_dim), k(o.k, p.head_dim), v(o.v, p.head_dim);
  uint32_t* const counts = data<uint32_t>(o.count);
  counts[0] = 1 + p.head_state;
  ctx.threads.run(p.heads, [&](uint32_t item, uint32_t worker) {
    const uint32_t head = p.first_head + item;
    const HeadState& state = ctx.heads[p.head_state + head];
    const EntryList list = entry_list(ctx, o.list, head, p.list_capacity, p.head_state);
    const RowScratch scratch = worker_scratch<RowScratch>(ctx.scratch.data(), worker, p.head_dim);
    const uint32_t in_pool = o.chunk_k ? state.n_entries : UINT32_MAX;
    uint32_t copies = 0;
    const auto copy_row = [&](const KvRows& from, const std::byte* row, const KvRows& to, float* values) {
      std::byte* const copy = to.at(head, p.spill_capacity, copies);
      from.format.load_row(row, values, p.head_dim);
      if (from.format.type == to.format.type)
        std::memcpy(copy, row, to.bytes);
      else
        to.format.store_row(values, copy, p.head_dim);
    };
    const uint32_t n = step_entries(ctx.step, state);
    for (uint32_t entry = 0, listed = 0; entry < n; ++entry) {
      if (listed < list.count && list[listed] == entry) {
        ++listed;
        continue;
      }
      const bool chunk = entry >= in_pool;
      const uint32_t row = chunk ? entry - in_pool : entry;
      copy_row(pool_k, chunk ? chunk_k.at(head, p.chunk_capacity, row) : pool_k.in_run(state, row), k,
               at<float>(o.keys, head, p.spill_capacity, copies, p.head_dim));
      copy_row(pool_v, chunk ? chunk_v.at(head, p.chunk_capacity, row) : pool_v.in_run(state, row), v,
               scratch.row);
      *at<int32_t>(o.pos, head, p.spill_capacity, copies) =
          chunk ? *at<int32_t>(o.chunk_pos, head, p.chunk_capacity, row)
                : *in_run<int32_t>(o.pool_pos, state, row);
      *at<float>(o.cis, head, p.spill_capacity, copies) =
          chunk ? *at<float>(o.chunk_cis, head, p.chunk_capacity, row)
                : *in_run<float>(o.pool_cis, state, row);
      ++copies;
    }
    counts[1 + head] = copies;
  });
}

}  // namespace thimble::cpu
