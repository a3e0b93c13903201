#include <cmath>

#include "backends/cpu/mixer_kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void gate(const Context& c, const Gate& op) {
  const GateParams& p = op.p;
  for_rows(c, c.step.n_rows, p.groups * p.cols, [&](uint32_t row) {
    for (uint32_t group = 0; group < p.groups; ++group) {
      const float* g =
          data<float>(op.g) + size_t(row) * p.g_stride + p.g_column + size_t(group) * p.g_group_stride;
      float* x = data<float>(op.x) + size_t(row) * p.x_stride + size_t(group) * p.cols;
      if (p.g_cols == p.cols) {
        mixer_kernels().gate(g, x, p.cols);
      } else {
        const float factor = 1.0f / (1.0f + std::exp(-*g));
        for (uint32_t i = 0; i < p.cols; ++i) x[i] *= factor;
      }
    }
  });
}

}  // namespace thimble::cpu
