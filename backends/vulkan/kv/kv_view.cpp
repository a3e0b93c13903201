// kv_view: copies a list's entries of pool and chunk into rows of halves, with keys rotated by list index.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void kv_view(Recording& r, const KvView& op) {
  constexpr uint32_t kRows = 8;  // rows per workgroup
  const uint64_t row = kv_bytes(op.pool_k.type, op.p.head_dim), chunk = op.p.chunk_capacity * row,
                 view = op.p.view_capacity * kv_bytes(DType::kF16, op.p.head_dim);
  const uint32_t groups =
      std::min(static_cast<uint32_t>(ceil_div(op.p.view_capacity, kRows)), r.limits().max_groups);
  const View &pool_k = op.pool_k.values, &pool_v = op.pool_v.values;
  for_run_windows(r.limits(), pool_k, row, [&](const RunWindow& window) {
    for_head_ranges(
        r.limits(), std::max(chunk, view), op.p.first_head, op.p.heads, [&](uint32_t first, uint32_t heads) {
          struct {
            KvViewParams p;
            RunWindow window;
          } push{op.p, window};
          push.p.first_head = first;
          push.p.heads = heads;
          r.dispatch(
              Shader::kKvView,
              {op.p.head_dim, op.list ? 1u : 0u, kv_format_number(op.pool_k.type), op.pool_v ? 1u : 0u},
              {reads(window.of(pool_k, row)), reads(window.of(pool_v, row)),
               reads(of_heads(op.chunk_k.values, chunk, first, heads)),
               reads(of_heads(op.chunk_v.values, chunk, first, heads)), reads(op.list), reads(op.rope),
               writes(of_heads(op.k, view, first, heads)), writes(of_heads(op.v, view, first, heads))},
              push, groups);
        });
  });
}

}  // namespace thimble::vulkan
