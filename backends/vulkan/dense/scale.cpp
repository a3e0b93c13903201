#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void scale(Recording& r, const Scale& op) {
  constexpr uint32_t kThreads = 64;
  r.dispatch(Shader::kScale, {op.positions ? 1u : 0u}, {reads(op.x), writes(op.y), reads(op.positions)}, op.p,
             static_cast<uint32_t>(ceil_div(op.p.cols, kThreads)), r.most_rows(op.p.rows));
}

}  // namespace thimble::vulkan
