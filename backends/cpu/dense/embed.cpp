#include "backends/cpu/kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void embed(const Context& c, const Embed& op) {
  const EmbedParams& p = op.p;
  const int32_t* tokens = op.tokens ? data<int32_t>(op.tokens) : nullptr;
  const size_t row_bytes = dtype_bytes(op.table.type, op.table.cols),
               first_byte = dtype_bytes(op.table.type, p.column);
  for_rows(c, c.step.n_rows, p.cols, [&](uint32_t row) {
    const size_t index = tokens ? static_cast<size_t>(tokens[row]) : row;
    float* x = data<float>(op.x) + size_t(row) * p.cols;
    kernels().dequantize(op.table.type, data<std::byte>(op.table) + index * row_bytes + first_byte, p.cols,
                         x);
    for (uint32_t i = 0; i < p.cols; ++i) x[i] *= p.scale;
  });
}

}  // namespace thimble::cpu
