// top_k: scores become ascending lists, in one dispatch for few scores or four for many.
#include <algorithm>
#include <bit>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint32_t kParts = 16;
constexpr uint32_t kDigits = 3, kBins = 2048;  // as in top_k_parts.glsl, top_k.glsl

uint32_t group_threads(const Limits& l) { return std::min(1024u, std::bit_floor(l.max_group_threads)); }

// A workgroup makes a head's list alone up to so many candidates, 32 a thread. Of more, several workgroups
// count together, digit by digit: on an H200 37 us for 16,740, which take the one 20, and 65 for 131,072.
bool takes_one_group(const Limits& l, uint64_t candidates) { return candidates <= 32 * group_threads(l); }

uint64_t parts_bytes(uint32_t heads) { return (uint64_t(kParts) * kBins + 2) * 2 * heads * sizeof(uint32_t); }

}  // namespace

void top_k(Recording& r, const TopK& op) {
  const TopKParams& p = op.p;
  const uint64_t candidates = p.purpose == kTopKRetain ? uint64_t(p.score_capacity) + p.chunk_capacity
                                                       : std::max(p.score_capacity, p.pos_capacity);
  const bool alone = takes_one_group(r.limits(), candidates);
  const View scratch = alone ? View() : r.scratch().slice(0, parts_bytes(p.heads));
  struct {
    TopKParams p;
    uint32_t parts, digit;
  } push{p, kParts, 0};
  const auto dispatch = [&](Shader shader, uint32_t x, uint32_t y) {
    r.dispatch(shader, {group_threads(r.limits()), op.gate ? 1u : 0u, op.chunk_scores ? 1u : 0u},
               {reads(op.scores), reads(op.chunk_scores), reads(op.pos), reads(op.gate), writes(op.list),
                writes(scratch)},
               push, x, y);
  };
  if (alone) {
    dispatch(Shader::kTopK, p.heads, 1);
    return;
  }
  for (push.digit = 0; push.digit < kDigits; ++push.digit) dispatch(Shader::kTopKCount, kParts, p.heads);
  dispatch(Shader::kTopKList, kParts, p.heads);
}

uint64_t top_k_scratch(const ModelShape& m, const SessionShape& s, const Limits& limits) {
  const uint64_t candidates = std::max<uint64_t>(uint64_t(s.pool_capacity) + s.chunk, s.positions);
  return takes_one_group(limits, candidates) ? 0 : parts_bytes(m.kv_heads);
}

}  // namespace thimble::vulkan
