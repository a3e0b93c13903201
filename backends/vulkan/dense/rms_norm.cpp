#include <algorithm>
#include <bit>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void rms_norm(Recording& r, const RmsNorm& op) {
  constexpr uint32_t kQuad = 4;
  RmsNormParams p = op.p;
  if (!p.x_row_stride) p.x_row_stride = p.row_stride;
  if (!p.x_group_stride) p.x_group_stride = p.cols;
  const uint32_t quads = static_cast<uint32_t>(ceil_div(p.cols, kQuad));
  const uint32_t threads = std::clamp(std::bit_ceil(quads), 32u, r.limits().threads(1024));
  const uint64_t starts = (op.x.offset | op.weight.offset | op.y.offset) / sizeof(float);
  const bool in_quads = (starts | p.row_stride | p.x_row_stride | p.x_group_stride | p.cols) % kQuad == 0;
  r.dispatch(Shader::kRmsNorm,
             {threads, static_cast<uint32_t>(ceil_div(quads, threads)), in_quads, p.add, p.center,
              op.weight ? 1u : 0u},
             {reads(op.x), reads(op.weight), writes(op.y)}, p, p.groups, r.most_rows(p.rows));
}

}  // namespace thimble::vulkan
