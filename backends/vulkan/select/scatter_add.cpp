// scatter_add: adds the values of heads to positions.
#include <algorithm>

#include "backends/regions.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void scatter_add(Recording& r, const ScatterAdd& op) {
  constexpr uint32_t kSlots = 128;  // positions per workgroup
  r.dispatch(Shader::kScatterAdd, {op.list ? 1u : 0u, op.weights ? 1u : 0u},
             {reads(op.pos), reads(op.weights), reads(op.list), writes(op.sums)}, op.p,
             std::min(units(op.p.slots, kSlots), r.limits().max_groups));
}

}  // namespace thimble::vulkan
