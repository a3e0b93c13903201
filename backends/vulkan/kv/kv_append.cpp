// kv_append: appends the step's k and v rows to the pool or the chunk buffer.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"
#include "backends/vulkan/shaders/kv/kv_params.h"

namespace thimble::vulkan {

void kv_append(Recording& r, const KvAppend& op) {
  constexpr uint32_t kThreads = 128;
  const View &k = op.k.values, &v = op.v.values;
  const uint64_t k_bytes = kv_bytes(op.k.type, op.p.head_dim), v_bytes = kv_bytes(op.v.type, op.p.head_dim);
  const bool blocks = has_kv_blocks(op.k, op.v);
  // A thread stores a word of both, and there may be one word more, because an odd head_dim may shift rows by
  // half a word. With blocks, eight threads store 64 channels.
  const uint64_t threads = blocks ? uint64_t(r.most_rows()) * ceil_div(op.p.head_dim, 64) * 8
                                  : uint64_t(r.most_rows()) * op.p.head_dim / 2 + 1;
  const auto append = [&](const View& own_k, const View& own_v, uint32_t first, uint32_t heads,
                          const RunWindow& window) {
    struct {
      KvAppendParams p;
      RunWindow window;
    } push{op.p, window};
    push.p.first_head = first;
    push.p.heads = heads;
    r.dispatch(blocks ? Shader::kKvAppendBlocks : Shader::kKvAppend,
               {op.p.rope.mode == kRopeOriginal ? 1u : 0u, op.p.into == kIntoPool ? 1u : 0u,
                op.positions ? 1u : 0u, kv_format_number(op.k.type), kv_format_number(op.v.type)},
               {reads(op.qkv), reads(op.rope), writes(own_k), writes(own_v), writes(op.pos),
                writes(op.saturated), reads(op.positions)},
               push, static_cast<uint32_t>(ceil_div(threads, kThreads)), heads, v ? 2 : 1);
  };
  if (op.p.into == kIntoPool) {
    for_run_windows(r.limits(), op.k, op.v, op.p.head_dim, [&](const RunWindow& window) {
      append(window.of(k, k_bytes), window.of(v, v_bytes), op.p.first_head, op.p.heads, window);
    });
  } else {
    const uint64_t k_head = op.p.chunk_capacity * k_bytes, v_head = op.p.chunk_capacity * v_bytes;
    for_head_ranges(r.limits(), std::max(k_head, v_head), op.p.first_head, op.p.heads,
                    [&](uint32_t first, uint32_t heads) {
                      append(of_heads(k, k_head, first, heads), of_heads(v, v_head, first, heads), first,
                             heads, {});
                    });
  }
}

bool norm_append(Recording& r, const RmsNorm& q, const RmsNorm& k, const KvAppend& op) {
  constexpr uint32_t kThreads = 128;
  const uint64_t entry_bytes = kv_bytes(op.k.type, op.p.head_dim);
  if (op.p.head_dim % 2 || has_kv_blocks(op.k, op.v) ||
      op.k.values.bytes / entry_bytes > most_entries(r.limits(), entry_bytes))
    return false;
  const NormAppendParams params{.append = op.p, .query_heads = q.p.groups, .eps = q.p.eps};
  r.dispatch(Shader::kNormAppend,
             {kThreads, op.p.head_dim, op.p.rope.mode == kRopeOriginal, kv_format_number(op.k.type)},
             {writes(op.qkv), reads(op.rope), writes(op.k.values), writes(op.v.values), writes(op.pos),
              writes(op.saturated), reads(q.weight), reads(k.weight)},
             params, q.p.groups + 2 * op.p.heads);
  return true;
}

}  // namespace thimble::vulkan
