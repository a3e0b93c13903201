#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void copy(Recording& r, const Copy& op) {
  constexpr uint32_t kThreads = 64, kEach = 4;
  r.dispatch(Shader::kCopy, {}, {reads(op.src), writes(op.dst)}, op.p,
             static_cast<uint32_t>(ceil_div(op.p.cols, kThreads * kEach)), r.most_rows(op.p.rows));
}

}  // namespace thimble::vulkan
