#include "backends/cpu/kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void rms_norm(const Context& c, const RmsNorm& op) {
  for_rows(c, row_count(c, op.p.rows), op.p.cols * op.p.groups, [&](uint32_t row) {
    for (uint32_t group = 0; group < op.p.groups; ++group) {
      const size_t at = size_t(row) * op.p.row_stride + size_t(group) * op.p.cols;
      kernels().rms_norm(data<float>(op.x) + at, data<float>(op.weight), op.p.cols, op.p.eps, op.p.add != 0,
                         data<float>(op.y) + at);
    }
  });
}

}  // namespace thimble::cpu
