#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void log_prob(Recording& r, const LogProb& op) {
  const uint32_t threads = r.limits().threads(1024);
  r.dispatch(Shader::kLogProb, {threads}, {reads(op.x), reads(op.target), writes(op.y)}, op.p,
             r.most_rows(kLogitRows));
}

}  // namespace thimble::vulkan
