// kv_append: the step's k and v rows go into the pool or the chunk buffer.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void kv_append(Recording& r, const KvAppend& op) {
  constexpr uint32_t kThreads = 128;
  const uint64_t head_bytes = uint64_t(op.p.capacity) * op.p.head_dim * sizeof(uint16_t);
  // One word more than the rows have: an odd head_dim may shift them by half a word.
  const uint64_t words = uint64_t(r.most_rows()) * op.p.head_dim / 2 + 1;
  for_head_ranges(r.limits(), head_bytes, op.p.first_head, op.p.heads, [&](uint32_t first, uint32_t heads) {
    KvAppendParams p = op.p;
    p.first_head = first;
    p.heads = heads;
    r.dispatch(Shader::kKvAppend, {p.rope.mode == kRopeOriginal ? 1u : 0u},
               {reads(op.qkv), reads(op.rope), writes(of_heads(op.k, head_bytes, first, heads)),
                writes(of_heads(op.v, head_bytes, first, heads)), writes(op.pos)},
               p, static_cast<uint32_t>(ceil_div(words, kThreads)), heads, 2);
  });
}

}  // namespace thimble::vulkan
