#include <algorithm>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

// Bytes for the experts of this many choices, and again for their weights.
static uint64_t choice_bytes(uint64_t rows, uint32_t chosen) { return rows * chosen * sizeof(uint32_t); }

void route(Recording& r, const Route& op) {
  const RouteParams& p = op.p;
  const bool one_row = r.max_rows() == 1;
  const uint64_t bytes = choice_bytes(r.max_rows(), p.chosen);
  const View experts = r.scratch().slice(0, bytes), weights = r.scratch().slice(bytes, bytes);
  r.dispatch(Shader::kRoute,
             {r.limits().subgroup_size, p.experts, p.chosen, one_row, op.bias ? 1u : 0u, op.each ? 1u : 0u,
              std::max(p.groups, 1u), p.groups_used},
             {reads(op.logits), reads(op.bias), writes(one_row ? View{} : experts),
              writes(one_row ? View(op.weight) : weights), writes(one_row ? View(op.first) : View{}),
              writes(one_row ? View(op.row) : View{}), reads(op.each)},
             p, r.max_rows());
  if (one_row) return;
  r.dispatch(Shader::kRouteSlots, {r.limits().threads(1024)},
             {reads(experts), reads(weights), writes(op.first), writes(op.row), writes(op.weight)}, p,
             p.experts);
}

uint64_t route_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  return 2 * choice_bytes(s.chunk, m.chosen_experts);
}

}  // namespace thimble::vulkan
