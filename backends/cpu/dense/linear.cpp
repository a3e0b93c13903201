#include "backends/cpu/dense/matmul.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void linear(const Context& c, const Linear& op) {
  const uint32_t rows = row_count(c, op.p.rows);
  const size_t row_bytes = dtype_bytes(op.w.type, op.p.in_cols);
  const DigitBlock* const digits =
      take_digits(c, c.threads.size() * kDenseScratch * sizeof(float), {op.w.type}, data<float>(op.x),
                  op.p.x_stride, rows, op.p.in_cols);
  const Blocks blocks(rows, op.p.out_cols, c.threads.size(), digits);
  for_share(c, blocks.count(), [&](uint32_t item, uint32_t worker) {
    const Blocks::Block b = blocks[item];
    float* y = data<float>(op.y) + size_t(b.first_row) * op.p.y_stride + b.first_col;
    if (op.bias) {
      const float* bias = data<float>(op.bias) + b.first_col;
      for (uint32_t r = 0; r < b.rows; ++r)
        for (uint32_t i = 0; i < b.cols; ++i) {
          float& element = y[size_t(r) * op.p.y_stride + i];
          element = op.p.add ? element + bias[i] : bias[i];
        }
    }
    float* const scratch = dense_scratch(c, worker);
    const auto multiply = [&](float* to, size_t stride, bool accumulate) {
      matmul({.x = data<float>(op.x) + size_t(b.first_row) * op.p.x_stride,
              .x_stride = op.p.x_stride,
              .x_rows = b.rows,
              .type = op.w.type,
              .w = data<std::byte>(op.w) + b.first_col * row_bytes,
              .cols = b.cols,
              .n = op.p.in_cols,
              .y = to,
              .y_stride = stride,
              .accumulate = accumulate,
              .digits = digits},
             scratch);
    };
    const bool adds = op.p.add != 0 || op.bias;
    if (!adds || op.w.scale == 1) {
      multiply(y, op.p.y_stride, adds);
      return scale_block(op.w.scale, b.rows, b.cols, y, op.p.y_stride);
    }
    float* const product = scratch + kMatmulScratch;
    multiply(product, b.cols, false);
    for (uint32_t r = 0; r < b.rows; ++r)
      for (uint32_t i = 0; i < b.cols; ++i)
        y[size_t(r) * op.p.y_stride + i] += op.w.scale * product[size_t(r) * b.cols + i];
  });
}

}  // namespace thimble::cpu
