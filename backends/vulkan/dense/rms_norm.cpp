#include <algorithm>
#include <bit>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void rms_norm(Recording& r, const RmsNorm& op) {
  constexpr uint32_t kQuad = 4;
  const uint32_t quads = static_cast<uint32_t>(ceil_div(op.p.cols, kQuad));
  const uint32_t threads = std::clamp(std::bit_ceil(quads), 32u, r.limits().threads(1024));
  const bool in_quads =
      ((op.x.offset | op.weight.offset | op.y.offset) / sizeof(float) | op.p.row_stride | op.p.cols) %
          kQuad ==
      0;
  r.dispatch(Shader::kRmsNorm,
             {threads, static_cast<uint32_t>(ceil_div(quads, threads)), in_quads, op.p.add, op.p.center,
              op.weight ? 1u : 0u},
             {reads(op.x), reads(op.weight), writes(op.y)}, op.p, op.p.groups, r.most_rows(op.p.rows));
}

}  // namespace thimble::vulkan
