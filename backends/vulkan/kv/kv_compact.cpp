// kv_compact: keeps the listed entries of pool and chunk, in place; one dispatch per array.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void kv_compact(Recording& r, const KvCompact& op) {
  // 32 bytes, the smallest unit of memory transfers; a row of 128 channels then occupies 8 workgroups.
  constexpr uint32_t kWidth = 8;
  const uint32_t threads = std::min(512u, r.limits().max_group_threads);
  const auto compact = [&](const Out& all, const In& all_chunk, uint32_t words) {
    if (!all) return;
    const uint64_t row = words * sizeof(uint32_t), chunk = op.p.chunk_capacity * row;
    const uint32_t width = std::min(words, kWidth);
    for_run_windows(r.limits(), all, row, [&](const RunWindow& window) {
      for_head_ranges(r.limits(), chunk, op.p.first_head, op.p.heads, [&](uint32_t first, uint32_t heads) {
        struct {
          KvCompactParams p;
          RunWindow window;
          uint32_t words;
        } push{op.p, window, words};
        push.p.first_head = first;
        push.p.heads = heads;
        r.dispatch(
            Shader::kKvCompact, {threads / width * width, width, op.list ? 1u : 0u, all_chunk ? 1u : 0u},
            {reads(op.list), reads(of_heads(all_chunk, chunk, first, heads)), writes(window.of(all, row))},
            push, static_cast<uint32_t>(ceil_div(words, width)), heads);
      });
    });
  };
  const auto row_words = [&](const KvArray& a) {
    return static_cast<uint32_t>(kv_bytes(a.type, op.p.head_dim) / sizeof(uint32_t));
  };
  compact(op.k.values, op.chunk_k.values, row_words(op.k));
  compact(op.v.values, op.chunk_v.values, row_words(op.v));
  compact(op.pos, op.chunk_pos, 1);
  compact(op.cis, op.chunk_cis, 1);
}

}  // namespace thimble::vulkan
