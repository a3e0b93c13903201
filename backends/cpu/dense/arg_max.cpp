#include <algorithm>
#include <bit>

#include "backends/cpu/ops.h"
#include "backends/order_bits.h"

namespace thimble::cpu {

void arg_max(const Context& c, const ArgMax& op) {
  for_rows(c, c.step.n_logit_rows, op.p.cols, [&](uint32_t row) {
    const float* x = data<float>(op.x) + size_t(row) * op.p.cols;
    constexpr uint32_t kExponent = 0x7f800000;  // all bits are set in infinity and NaN
    const auto order = [&](uint32_t i) { return order_bits(std::bit_cast<uint32_t>(x[i])); };
    // Compare as integers, which compilers vectorize.
    uint32_t largest = 0, exponent = 0;
    for (uint32_t i = 0; i < op.p.cols; ++i) {
      exponent = std::max(exponent, std::bit_cast<uint32_t>(x[i]) & kExponent);
      largest = std::max(largest, order(i));
    }
    int32_t index = -1;
    if (exponent != kExponent)
      for (index = 0; order(static_cast<uint32_t>(index)) != largest;) ++index;
    data<int32_t>(op.index)[row] = index;
  });
}

}  // namespace thimble::cpu
