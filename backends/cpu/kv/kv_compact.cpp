// kv_compact: keeps the listed entries of pool and chunk, in place.
#include <algorithm>
#include <cstring>

#include "backends/cpu/entries.h"
#include "base/bits.h"

namespace thimble::cpu {

// Compacts one array of one head, in rows of `bytes`. List entries ascend, so no entry moves up and none is
// overwritten before it has moved. Neighbours move together; entries before the first evicted one already are
// in place.
static void compact(const EntryList& list, uint32_t n_entries, std::byte* pool, const std::byte* chunk,
                    size_t bytes) {
  for (uint32_t i = 0; i < list.count;) {
    const uint32_t entry = list[i], limit = entry < n_entries ? n_entries : UINT32_MAX;
    uint32_t run = 1;
    while (i + run < list.count && list[i + run] == entry + run && entry + run < limit) ++run;
    std::byte* to = pool + i * bytes;
    if (entry >= n_entries)
      std::memcpy(to, chunk + (entry - n_entries) * bytes, run * bytes);
    else if (entry != i)
      std::memmove(to, pool + entry * bytes, run * bytes);
    i += run;
  }
}

void kv_compact(const Context& ctx, const KvCompact& o) {
  const KvCompactParams& p = o.p;
  struct Column {
    const View& pool;
    const View& chunk;
    size_t bytes;  // per row
  };
  const Column columns[] = {{o.k.values, o.chunk_k.values, kv_bytes(o.k.type, p.head_dim)},
                            {o.v.values, o.chunk_v.values, kv_bytes(o.v.type, p.head_dim)},
                            {o.pos, o.chunk_pos, sizeof(int32_t)},
                            {o.cis, o.chunk_cis, sizeof(float)}};
  ctx.threads.run(4 * p.heads, [&](uint32_t item, uint32_t) {
    const Column& column = columns[item % 4];
    if (!column.pool) return;
    const uint32_t head = p.first_head + item / 4;
    const HeadState& state = ctx.heads[p.head_state + head];
    compact(entry_list(ctx, o.list, head, p.list_capacity, p.head_state),
            o.chunk_k ? state.n_entries : UINT32_MAX, in_run<std::byte>(column.pool, state, 0, column.bytes),
            at<std::byte>(column.chunk, head, p.chunk_capacity, 0, column.bytes), column.bytes);
  });
}

}  // namespace thimble::cpu
