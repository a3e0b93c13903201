#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void activation(Recording& r, const Activation& op) {
  constexpr uint32_t kThreads = 64;
  r.dispatch(Shader::kActivation, {}, {writes(op.x)}, op.p,
             static_cast<uint32_t>(ceil_div(op.p.cols, kThreads)), r.most_rows());
}

}  // namespace thimble::vulkan
