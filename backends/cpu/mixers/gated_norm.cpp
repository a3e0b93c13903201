#include "backends/cpu/mixer_kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void gated_norm(const Context& c, const GatedNorm& op) {
  const GatedNormParams& p = op.p;
  for_rows(c, c.step.n_rows, p.groups * p.cols, [&](uint32_t row) {
    for (uint32_t group = 0; group < p.groups; ++group) {
      const size_t first = size_t(group) * p.cols, at = size_t(row) * p.row_stride + first;
      const float* weight = op.weight ? data<float>(op.weight) + (p.weight_per_group ? first : 0) : nullptr;
      mixer_kernels().gated_norm(p, data<float>(op.x) + at,
                                 data<float>(op.z) + size_t(row) * p.z_stride + p.z_column + first, weight,
                                 data<float>(op.y) + at);
    }
  });
}

}  // namespace thimble::cpu
