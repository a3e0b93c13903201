#include <algorithm>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void sink_score(Recording& r, const SinkScore& op) {
  const uint32_t lanes = r.limits().subgroup_size, threads = std::max(128u, lanes);
  r.dispatch(Shader::kSinkScore, {threads, lanes},
             {reads(op.q), reads(op.k), reads(op.q_norm), reads(op.k_norm), reads(op.sinks), reads(op.bias),
              writes(op.score)},
             op.p, static_cast<uint32_t>(ceil_div(r.most_rows(), threads / lanes)), op.p.heads);
}

}  // namespace thimble::vulkan
