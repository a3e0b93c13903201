#include "backends/cpu/kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void embed(const Context& c, const Embed& op) {
  const int32_t* tokens = data<int32_t>(op.tokens);
  const size_t row_bytes = dtype_bytes(op.table.type, op.p.cols);
  for_rows(c, c.step.n_rows, op.p.cols, [&](uint32_t row) {
    const std::byte* from = data<std::byte>(op.table) + static_cast<size_t>(tokens[row]) * row_bytes;
    kernels().dequantize(op.table.type, from, op.p.cols, data<float>(op.x) + size_t(row) * op.p.cols);
  });
}

}  // namespace thimble::cpu
