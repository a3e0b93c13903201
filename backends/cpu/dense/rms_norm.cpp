#include "backends/cpu/kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void rms_norm(const Context& c, const RmsNorm& op) {
  const RmsNormParams& p = op.p;
  const size_t x_row_stride = p.x_row_stride ? p.x_row_stride : p.row_stride;
  const size_t x_group_stride = p.x_group_stride ? p.x_group_stride : p.cols;
  for_rows(c, row_count(c, p.rows), p.cols * p.groups, [&](uint32_t row) {
    for (uint32_t group = 0; group < p.groups; ++group) {
      const float* x = data<float>(op.x) + row * x_row_stride + group * x_group_stride;
      kernels().rms_norm(x, op.weight ? data<float>(op.weight) : nullptr, p.cols, p.eps, p.center != 0,
                         p.add != 0, data<float>(op.y) + size_t(row) * p.row_stride + size_t(group) * p.cols);
    }
  });
}

}  // namespace thimble::cpu
