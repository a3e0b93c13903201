// head_linear: a matrix product in each head.
#include <cstring>

#include "backends/cpu/dense/matmul.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {
namespace {

// y = W^T x for one head, where W is [in_cols][out_cols]. The rows of W already have the order of a panel.
void multiply_transposed(const HeadLinear& op, const std::byte* w, uint32_t rows, const float* x, float* y,
                         float* scratch) {
  const HeadLinearParams& p = op.p;
  const Kernels& k = kernels();
  const size_t row_bytes = dtype_bytes(op.w.type, p.out_cols);
  const uint32_t panels = (p.out_cols + k.panel_cols - 1) / k.panel_cols, width = panels * k.panel_cols;
  float* const line = scratch + kMatmulScratch;
  std::memset(line, 0, width * sizeof(float));
  const uint32_t depth = std::min(p.in_cols, kMatmulScratch / width);
  for (uint32_t first = 0; first < p.in_cols; first += depth) {
    const uint32_t n = std::min(depth, p.in_cols - first);
    for (uint32_t i = 0; i < n; ++i) {
      k.dequantize(op.w.type, w + (first + i) * row_bytes, p.out_cols, line);
      for (uint32_t panel = 0; panel < panels; ++panel)
        std::memcpy(scratch + (size_t(panel) * n + i) * k.panel_cols, line + panel * k.panel_cols,
                    k.panel_cols * sizeof(float));
    }
    k.multiply(x + first, p.x_stride, rows, scratch, n, p.out_cols, y, p.y_stride, first > 0);
  }
}

}  // namespace

void head_linear(const Context& c, const HeadLinear& op) {
  const HeadLinearParams& p = op.p;
  const uint32_t rows = c.step.n_rows, block = p.transposed ? p.out_cols : kBlockCols,
                 blocks = (p.out_cols + block - 1) / block;
  const size_t row_bytes = dtype_bytes(op.w.type, p.transposed ? p.out_cols : p.in_cols);
  for_share(c, p.heads * blocks, [&](uint32_t item, uint32_t worker) {
    const uint32_t head = item / blocks, first = item % blocks * block;
    const float* x = data<float>(op.x) + size_t(head) * p.x_head_stride;
    float* const y = data<float>(op.y) + size_t(head) * p.y_head_stride;
    float* const product = y + p.copied + first;
    const std::byte* w = data<std::byte>(op.w) +
                         (p.w_first + size_t(head) * p.w_head_rows + (p.transposed ? 0 : first)) * row_bytes;
    const uint32_t cols = std::min(block, p.out_cols - first);
    if (p.transposed)
      multiply_transposed(op, w, rows, x, product, dense_scratch(c, worker));
    else
      matmul({.x = x,
              .x_stride = p.x_stride,
              .x_rows = rows,
              .type = op.w.type,
              .w = w,
              .cols = cols,
              .n = p.in_cols,
              .y = product,
              .y_stride = p.y_stride,
              .accumulate = false},
             dense_scratch(c, worker));
    scale_block(op.w.scale, rows, cols, product, p.y_stride);
    for (uint32_t row = 0; row < rows && first == 0; ++row)
      std::memcpy(y + size_t(row) * p.y_stride, x + size_t(row) * p.x_stride + p.in_cols,
                  p.copied * sizeof(float));
  });
}

}  // namespace thimble::cpu
