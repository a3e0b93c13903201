#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void activation(Recording& r, const Activation& op) {
  constexpr uint32_t kThreads = 64;
  r.dispatch(Shader::kActivation, {bool(op.times)}, {writes(op.x), reads(op.times)}, op.p,
             static_cast<uint32_t>(ceil_div(op.p.cols, kThreads)), r.most_rows());
}

}  // namespace thimble::vulkan
