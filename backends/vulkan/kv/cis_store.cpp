// cis_store: stores the retention scores of the step's rows.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void cis_store(Recording& r, const CisStore& op) {
  constexpr uint32_t kThreads = 64;
  r.dispatch(Shader::kCisStore, {}, {reads(op.score), writes(op.cis)}, op.p,
             static_cast<uint32_t>(ceil_div(r.most_rows(), kThreads)), op.p.heads);
}

}  // namespace thimble::vulkan
