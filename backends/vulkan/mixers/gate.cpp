#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void gate(Recording& r, const Gate& op) {
  constexpr uint32_t kThreads = 64;
  r.dispatch(Shader::kGate, {}, {reads(op.g), writes(op.x)}, op.p,
             static_cast<uint32_t>(ceil_div(uint64_t(op.p.groups) * op.p.cols, kThreads)), r.most_rows());
}

}  // namespace thimble::vulkan
