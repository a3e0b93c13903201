// linear: a single row by vector products, several rows on tensor cores; few rows use W as stored. Siblings
// with adjacent outputs are computed as one product, because k and v alone are too narrow to occupy a card.
#include <algorithm>

#include "backends/cuda/dense/dense.h"
#include "backends/cuda/dense/exact_rows.h"
#include "backends/cuda/dense/few_rows.h"
#include "backends/cuda/dense/matvec.h"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

__global__ void bias_kernel(const StepParams* step, LinearParams p, const float* bias, float* y) {
  begin_kernel();
  const uint32_t row = blockIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= row_count(*step, p.rows) || col >= p.out_cols) return;
  float& element = y[uint64_t(row) * p.y_stride + col];
  element = p.add ? element + bias[col] : bias[col];
}

// How many of these siblings form one product: they do the same to consecutive columns of y.
size_t side_by_side(std::span<const Linear> siblings) {
  const Linear& first = siblings[0];
  const float* next = data<float>(first.y) + first.p.out_cols;
  size_t n = 1;
  for (; n < siblings.size(); ++n) {
    const Linear& op = siblings[n];
    if (data<float>(op.y) != next || op.p.y_stride != first.p.y_stride || op.p.add != first.p.add ||
        !op.bias != !first.bias || op.w.scale != first.w.scale)
      break;
    next += op.p.out_cols;
  }
  return n;
}

// Converts rows [first, first + count) of the siblings' matrices, taken as consecutive, to f16.
void dequantize_slice(const Launch& l, std::span<const Linear> siblings, uint32_t first, uint32_t count,
                      __half* to, uint32_t k) {
  uint32_t start = 0;
  for (const Linear& op : siblings) {
    const uint32_t end = start + op.p.out_cols, from = std::max(first, start),
                   until = std::min(first + count, end);
    if (from < until)
      dequantize(l, op.w, from - start, until - from, to + uint64_t(from - first) * k, k, false);
    start = end;
  }
}

}  // namespace

void linear(const Launch& l, std::span<const Linear> siblings, const RmsNorm* norm) {
  const LinearParams& p = siblings[0].p;
  if (p.rows == kLogitRows || l.max_rows == 1) return multiply_vectors(l, siblings, norm);
  if (siblings[0].exact) return multiply_exactly(l, siblings);  // then all are
  if (std::all_of(siblings.begin(), siblings.end(),
                  [&](const Linear& op) { return can_multiply_few(l, op.w.type); })) {
    const Operands o = operands(l.max_rows, p.in_cols, 0);
    scale_rows(l, o, data<float>(siblings[0].x), p.x_stride, p.in_cols, 0, l.max_rows);
    for (const Linear& op : siblings) multiply_few(l, o, op);
    return;
  }
  for (const Linear& op : siblings)
    if (op.bias) {
      const dim3 blocks(static_cast<uint32_t>(ceil_div(op.p.out_cols, 256)), l.max_rows);
      launch(l, bias_kernel, blocks, 256, 0, l.step, op.p, data<float>(op.bias), data<float>(op.y));
    }
  const auto operands_of = [&](uint32_t cols) { return operands(l.max_rows, p.in_cols, cols); };
  const Operands of_x = operands_of(0);
  for (uint32_t first_row = 0; first_row < l.max_rows; first_row += of_x.x_rows) {
    const uint32_t rows = std::min(l.max_rows - first_row, of_x.x_rows);
    scale_rows(l, of_x, data<float>(siblings[0].x), p.x_stride, p.in_cols, first_row, rows);
    for (std::span<const Linear> rest = siblings; !rest.empty();) {
      const std::span<const Linear> group = rest.first(side_by_side(rest));
      rest = rest.subspan(group.size());
      const Linear& op = group[0];
      uint32_t cols = 0;
      for (const Linear& sibling : group) cols += sibling.p.out_cols;
      const Product product{.cols = cols,
                            .first_row = first_row,
                            .rows = rows,
                            .y = data<float>(op.y) + uint64_t(first_row) * op.p.y_stride,
                            .y_stride = op.p.y_stride,
                            .y_cols = cols,
                            .add = op.p.add || op.bias,
                            .w_scale = {op.w.scale}};
      multiply_slices(l, operands_of(cols), product, [&](uint32_t first, uint32_t count, __half* to) {
        dequantize_slice(l, group, first, count, to, of_x.k);
      });
    }
  }
}

void linear(const Launch& l, const Linear& op) { linear(l, {&op, 1}, nullptr); }

}  // namespace thimble::cuda
