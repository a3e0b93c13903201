// key_diff: how unlike the mean of all keys each key is; one dispatch adds unit keys, one scores.
#include <algorithm>

#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void key_diff(Recording& r, const KeyDiff& op) {
  const Shader shader = has_kv_blocks(op.k.type) ? Shader::kKeyDiffBlocks : Shader::kKeyDiff;
  const uint32_t lanes = r.limits().subgroup_size, threads = std::max(128u, lanes),
                 format = kv_format_number(op.k.type);
  const View &k = op.k.values, &chunk_k = op.chunk_k.values;
  const uint64_t row = kv_bytes(op.k.type, op.p.head_dim), chunk = op.p.chunk_capacity * row;
  const uint32_t groups = std::min(op.p.blocks, r.limits().max_groups);
  for_run_windows(r.limits(), k, row, [&](const RunWindow& window) {
    for_head_ranges(r.limits(), chunk, op.p.first_head, op.p.heads, [&](uint32_t first, uint32_t heads) {
      struct {
        KeyDiffParams p;
        RunWindow window;
      } push{op.p, window};
      push.p.first_head = first;
      push.p.heads = heads;
      const View run = window.of(k, row), rows = of_heads(chunk_k, chunk, first, heads);
      r.dispatch(shader, {threads, lanes, op.p.head_dim, 0, format},
                 {reads(run), reads(rows), writes(op.sums), writes({}), writes({})}, push, groups, heads);
      r.dispatch(shader, {threads, lanes, op.p.head_dim, 1, format},
                 {reads(run), reads(rows), reads(op.sums), writes(op.cis), writes(op.chunk_cis)}, push,
                 groups, heads);
    });
  });
}

}  // namespace thimble::vulkan
