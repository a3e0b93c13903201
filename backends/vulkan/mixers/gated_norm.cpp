#include <algorithm>
#include <bit>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void gated_norm(Recording& r, const GatedNorm& op) {
  constexpr uint32_t kQuad = 4;
  const GatedNormParams& p = op.p;
  const uint32_t quads = static_cast<uint32_t>(ceil_div(p.cols, kQuad));
  const uint32_t threads = std::clamp(std::bit_ceil(quads), 32u, r.limits().threads(1024));
  const uint64_t starts = (op.x.offset | op.z.offset | op.weight.offset | op.y.offset) / sizeof(float);
  const bool in_quads = (starts | p.row_stride | p.z_stride | p.z_column | p.cols) % kQuad == 0;
  r.dispatch(Shader::kGatedNorm,
             {threads, static_cast<uint32_t>(ceil_div(quads, threads)), in_quads, p.order, p.act == kActSilu,
              bool(op.weight)},
             {reads(op.x), reads(op.z), reads(op.weight), writes(op.y)}, p, p.groups, r.most_rows());
}

}  // namespace thimble::vulkan
