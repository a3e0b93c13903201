#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void copy(Recording& r, const Copy& op) {
  constexpr uint32_t kThreads = 64, kEach = 4, kQuad = 4;
  const bool in_quads =
      ((op.src.offset | op.dst.offset) / sizeof(uint32_t) | op.p.cols | op.p.src_stride | op.p.dst_stride) %
          kQuad ==
      0;
  r.dispatch(Shader::kCopy, {in_quads}, {reads(op.src), writes(op.dst)}, op.p,
             static_cast<uint32_t>(ceil_div(op.p.cols / (in_quads ? kQuad : 1), kThreads * kEach)),
             r.most_rows(op.p.rows));
}

}  // namespace thimble::vulkan
