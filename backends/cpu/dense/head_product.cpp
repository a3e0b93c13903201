#include "backends/cpu/dense/head_product.h"

#include <cstring>

namespace thimble::cpu {
namespace {

// y = W^T x, where W is [in_cols][out_cols]. The rows of W already have the order of a panel.
void multiply_transposed(const HeadProduct& p, const std::byte* w, float* scratch) {
  const Kernels& k = kernels();
  const size_t row_bytes = dtype_bytes(p.w.type, p.out_cols);
  const uint32_t panels = (p.out_cols + k.panel_cols - 1) / k.panel_cols, width = panels * k.panel_cols;
  float* const line = scratch + kMatmulScratch;
  std::memset(line, 0, width * sizeof(float));
  const uint32_t depth = std::min(p.in_cols, kMatmulScratch / width);
  for (uint32_t first = 0; first < p.in_cols; first += depth) {
    const uint32_t n = std::min(depth, p.in_cols - first);
    for (uint32_t i = 0; i < n; ++i) {
      k.dequantize(p.w.type, w + (first + i) * row_bytes, p.out_cols, line);
      for (uint32_t panel = 0; panel < panels; ++panel)
        std::memcpy(scratch + (size_t(panel) * n + i) * k.panel_cols, line + panel * k.panel_cols,
                    k.panel_cols * sizeof(float));
    }
    k.multiply(p.x + first, p.x_stride, p.rows, scratch, n, p.out_cols, p.y, p.y_stride, first > 0);
  }
}

}  // namespace

void multiply_head(const HeadProduct& p, uint32_t first, float* scratch) {
  const size_t row_bytes = dtype_bytes(p.w.type, p.transposed ? p.out_cols : p.in_cols);
  const std::byte* const w = data<std::byte>(p.w) + p.first_row * row_bytes;
  const uint32_t cols = std::min(head_block(p), p.out_cols - first);
  if (p.transposed)
    multiply_transposed(p, w, scratch);
  else
    matmul({.x = p.x,
            .x_stride = p.x_stride,
            .x_rows = p.rows,
            .type = p.w.type,
            .w = w + first * row_bytes,
            .cols = cols,
            .n = p.in_cols,
            .y = p.y + first,
            .y_stride = p.y_stride,
            .accumulate = false},
           scratch);
  scale_block(p.w.scale, p.rows, cols, p.y + first, p.y_stride);
}

}  // namespace thimble::cpu
