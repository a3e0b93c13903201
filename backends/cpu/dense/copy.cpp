#include <cstring>

#include "backends/cpu/ops.h"

namespace thimble::cpu {

void copy(const Context& c, const Copy& op) {
  const uint32_t from = op.p.from_logit_row ? c.step.first_logit_row : 0;
  const uint32_t to = op.p.to_ring_row ? c.step.ring_row : 0;
  for_rows(c, row_count(c, op.p.rows), op.p.cols, [&](uint32_t row) {
    std::memcpy(data<float>(op.dst) + size_t(to + row) * op.p.dst_stride,
                data<float>(op.src) + size_t(from + row) * op.p.src_stride, op.p.cols * sizeof(float));
  });
}

}  // namespace thimble::cpu
