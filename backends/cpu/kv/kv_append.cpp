// kv_append: appends the step's k and v rows to the pool or the chunk buffer.
#include <atomic>
#include <cstring>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_scratch.h"
#include "backends/cpu/rope.h"

namespace thimble::cpu {

void kv_append(const Context& ctx, const KvAppend& o) {
  const KvAppendParams& p = o.p;
  const Rope rope(o.rope, p.rope);
  const KvRows k_rows(o.k, p.head_dim), v_rows(o.v, p.head_dim);
  const bool rotates = p.rope.mode == kRopeOriginal;
  ctx.threads.run(ctx.step.n_rows, [&](uint32_t row, uint32_t worker) {
    const RowScratch scratch = worker_scratch<RowScratch>(ctx.scratch.data(), worker, p.head_dim);
    const float* qkv = data<float>(o.qkv) + uint64_t(row) * p.row_stride;
    const int32_t position =
        o.positions ? data<int32_t>(o.positions)[row] : ctx.step.position + static_cast<int32_t>(row);
    if (rotates) rope.angles(static_cast<uint32_t>(position), scratch.angles);
    uint32_t saturated = 0;
    for (uint32_t head = p.first_head; head < p.first_head + p.heads; ++head) {
      const float* k = qkv + p.k_column + head * p.head_dim;
      const float* v = qkv + p.v_column + head * p.head_dim;
      if (rotates) {
        std::memcpy(scratch.row, k, p.head_dim * sizeof(float));
        rope.rotate(scratch.row, scratch.angles);
        k = scratch.row;
      }
      const uint64_t entry = first_row(ctx, p.into, head, p.chunk_capacity, p.head_state) + row;
      saturated += k_rows.format.store_row(k, k_rows[entry], p.head_dim);
      if (o.v) saturated += v_rows.format.store_row(v, v_rows[entry], p.head_dim);
      data<int32_t>(o.pos)[entry] = position;
    }
    if (saturated) std::atomic_ref(*data<uint32_t>(o.saturated)).fetch_add(saturated);
  });
}

}  // namespace thimble::cpu
