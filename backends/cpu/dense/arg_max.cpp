#include <limits>

#include "backends/cpu/ops.h"

namespace thimble::cpu {

void arg_max(const Context& c, const ArgMax& op) {
  for_rows(c, c.step.n_logit_rows, op.p.cols, [&](uint32_t row) {
    const float* x = data<float>(op.x) + size_t(row) * op.p.cols;
    // Nothing is greater than a NaN or smaller than minus infinity, so both lose to all else and a tie to the
    // first.
    float largest = -std::numeric_limits<float>::infinity();
    int32_t index = 0;
    for (uint32_t i = 0; i < op.p.cols; ++i)
      if (x[i] > largest) {
        largest = x[i];
        index = static_cast<int32_t>(i);
      }
    data<int32_t>(op.index)[row] = index;
  });
}

}  // namespace thimble::cpu
