#include <algorithm>
#include <cmath>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void log_prob(const Context& c, const LogProb& op) {
  for_rows(c, c.step.n_logit_rows, op.p.cols, [&](uint32_t row) {
    const float* x = data<float>(op.x) + size_t(row) * op.p.cols;
    const float largest = *std::max_element(x, x + op.p.cols);
    const double sum = kernels().sum_exp(x, op.p.cols, largest);
    const int32_t target = data<int32_t>(op.target)[row];
    data<float>(op.y)[row] =
        static_cast<float>(static_cast<double>(x[target]) - static_cast<double>(largest) - std::log(sum));
  });
}

}  // namespace thimble::cpu
