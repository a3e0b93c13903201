// query_gate: whether this step's query is close enough to the query that made the cached selection.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void query_gate(Recording& r, const QueryGate& op) {
  const uint32_t threads = r.limits().threads(1024);
  r.dispatch(Shader::kQueryGate, {threads, r.limits().subgroup_size},
             {reads(op.q), writes(op.cached), writes(op.gate)}, op.p, 1);
}

}  // namespace thimble::vulkan
