// kv_view: shows a list's entries of pool and chunk as rows of halves, rotated by list index.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void kv_view(Recording& r, const KvView& op) {
  constexpr uint32_t kRows = 8;  // of a workgroup
  const uint64_t row = op.p.head_dim * sizeof(uint16_t), pool = op.p.pool_capacity * row,
                 chunk = op.p.chunk_capacity * row, view = op.p.view_capacity * row;
  const uint32_t groups =
      std::min(static_cast<uint32_t>(ceil_div(op.p.view_capacity, kRows)), r.limits().max_groups);
  for_head_ranges(
      r.limits(), std::max({pool, chunk, view}), op.p.first_head, op.p.heads,
      [&](uint32_t first, uint32_t heads) {
        KvViewParams p = op.p;
        p.first_head = first;
        p.heads = heads;
        r.dispatch(
            Shader::kKvView, {p.head_dim, op.list ? 1u : 0u},
            {reads(of_heads(op.pool_k, pool, first, heads)), reads(of_heads(op.pool_v, pool, first, heads)),
             reads(of_heads(op.chunk_k, chunk, first, heads)),
             reads(of_heads(op.chunk_v, chunk, first, heads)), reads(op.list), reads(op.rope),
             writes(of_heads(op.k, view, first, heads)), writes(of_heads(op.v, view, first, heads))},
            p, groups);
      });
}

}  // namespace thimble::vulkan
