// top_k: turns scores into ascending lists, in one dispatch for few scores or four for many.
#include "backends/vulkan/select/top_k.h"

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

static uint64_t parts_bytes(uint32_t heads) {
  return (uint64_t(kListParts) * kListBins + 2) * 2 * heads * sizeof(uint32_t);
}

void top_k(Recording& r, const TopK& op) {
  const TopKParams& p = op.p;
  const bool alone = takes_one_group(r.limits(), candidates(op));
  const View scratch = alone ? View() : r.scratch().slice(0, parts_bytes(p.heads));
  struct {
    TopKParams p;
    uint32_t parts, digit;
  } push{p, alone ? 1 : kListParts, 0};
  const auto dispatch = [&](Shader shader) {
    r.dispatch(shader, {list_threads(r.limits()), op.gate ? 1u : 0u, op.chunk_scores ? 1u : 0u, p.page},
               {reads(op.scores), reads(op.chunk_scores), reads(op.pos), reads(op.gate), writes(op.list),
                writes(scratch)},
               push, push.parts, p.heads);
  };
  if (alone) {
    dispatch(Shader::kTopK);
    return;
  }
  for (push.digit = 0; push.digit < kListDigits; ++push.digit) dispatch(Shader::kTopKCount);
  dispatch(Shader::kTopKList);
}

uint64_t top_k_scratch(const ModelShape& m, const SessionShape& s, const Limits& limits) {
  const uint64_t most = std::max<uint64_t>(uint64_t(s.run_capacity) + s.chunk, s.positions);
  return takes_one_group(limits, most) ? 0 : parts_bytes(m.kv_heads);
}

}  // namespace thimble::vulkan
