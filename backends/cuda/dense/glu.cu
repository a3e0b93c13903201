// glu: a single row by vector products, several rows on tensor cores. Few rows use W as stored; with many
// rows one thread computes gate and up of an element.
#include "backends/cuda/dense/dense.h"
#include "backends/cuda/dense/few_rows.h"
#include "backends/cuda/dense/matvec.h"
#include "backends/cuda/ops.h"

namespace thimble::cuda {

void glu(const Launch& l, const Glu& op, const RmsNorm* norm) {
  const GluParams& p = op.p;
  if (l.max_rows == 1) return multiply_vectors(l, op, norm);

  if (op.gate.type == op.up.type && can_multiply_few(l, op.gate.type)) {
    const Operands few = operands(l.max_rows, p.in_cols, 0);
    scale_rows(l, few, data<float>(op.x), p.in_cols, p.in_cols, 0, l.max_rows);
    return multiply_few(l, few, op);
  }
  const uint32_t cols = 2 * static_cast<uint32_t>(round_up(p.out_cols, 8));
  const Operands o = operands(l.max_rows, p.in_cols, cols);
  for (uint32_t first_row = 0; first_row < l.max_rows; first_row += o.x_rows) {
    const uint32_t rows = std::min(l.max_rows - first_row, o.x_rows);
    scale_rows(l, o, data<float>(op.x), p.in_cols, p.in_cols, first_row, rows);
    const Product product{.cols = cols,
                          .first_row = first_row,
                          .rows = rows,
                          .y = data<float>(op.h) + uint64_t(first_row) * p.out_cols,
                          .y_stride = p.out_cols,
                          .y_cols = p.out_cols,
                          .glu = true,
                          .act = p.act,
                          .w_scale = {op.gate.scale, op.up.scale}};
    multiply_slices(l, o, product, [&](uint32_t first, uint32_t count, __half* to) {
      const uint32_t outputs = std::min(count / 2, p.out_cols - first / 2);
      dequantize(l, op.gate, first / 2, outputs, to, o.k, true);
      dequantize(l, op.up, first / 2, outputs, to + 8 * o.k, o.k, true);
    });
  }
}

void glu(const Launch& l, const Glu& op) { glu(l, op, nullptr); }

}  // namespace thimble::cuda
