#include "backends/cpu/kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void activation(const Context& c, const Activation& op) {
  for_rows(c, c.step.n_rows, op.p.cols, [&](uint32_t row) {
    const size_t at = size_t(row) * op.p.cols;
    const float* times = op.times ? data<float>(op.times) + at : nullptr;
    kernels().activate(op.p.act, data<float>(op.x) + at, times, op.p.cols);
  });
}

}  // namespace thimble::cpu
