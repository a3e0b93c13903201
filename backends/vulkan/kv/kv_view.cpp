// kv_view: copies a list's entries of pool and chunk into rows of halves, with keys rotated by list index.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void kv_view(Recording& r, const KvView& op) {
  constexpr uint32_t kRows = 8;  // rows per workgroup
  const uint64_t k_row = kv_bytes(op.pool_k.type, op.p.head_dim),
                 v_row = kv_bytes(op.pool_v.type, op.p.head_dim), chunk_k = op.p.chunk_capacity * k_row,
                 chunk_v = op.p.chunk_capacity * v_row,
                 view = op.p.view_capacity * kv_bytes(DType::kF16, op.p.head_dim);
  const uint32_t groups =
      std::min(static_cast<uint32_t>(ceil_div(op.p.view_capacity, kRows)), r.limits().max_groups);
  const View &pool_k = op.pool_k.values, &pool_v = op.pool_v.values;
  for_run_windows(r.limits(), op.pool_k, op.pool_v, op.p.head_dim, [&](const RunWindow& window) {
    for_head_ranges(
        r.limits(), std::max({chunk_k, chunk_v, view}), op.p.first_head, op.p.heads,
        [&](uint32_t first, uint32_t heads) {
          struct {
            KvViewParams p;
            RunWindow window;
          } push{op.p, window};
          push.p.first_head = first;
          push.p.heads = heads;
          r.dispatch(
              has_kv_blocks(op.pool_k, op.pool_v) ? Shader::kKvViewBlocks : Shader::kKvView,
              {op.p.head_dim, op.list ? 1u : 0u, kv_format_number(op.pool_k.type), op.pool_v ? 1u : 0u,
               kv_format_number(op.pool_v.type)},
              {reads(window.of(pool_k, k_row)), reads(window.of(pool_v, v_row)),
               reads(of_heads(op.chunk_k.values, chunk_k, first, heads)),
               reads(of_heads(op.chunk_v.values, chunk_v, first, heads)), reads(op.list), reads(op.rope),
               writes(of_heads(op.k, view, first, heads)), writes(of_heads(op.v, view, first, heads))},
              push, groups);
        });
  });
}

}  // namespace thimble::vulkan
