// head_linear: a matrix product in each head.
#include <cstring>

#include "backends/cpu/dense/head_product.h"

namespace thimble::cpu {

void head_linear(const Context& c, const HeadLinear& op) {
  const HeadLinearParams& p = op.p;
  const uint32_t rows = c.step.n_rows;
  const auto product = [&](uint32_t head) {
    return HeadProduct{.x = data<float>(op.x) + size_t(head) * p.x_head_stride,
                       .x_stride = p.x_stride,
                       .rows = rows,
                       .in_cols = p.in_cols,
                       .out_cols = p.out_cols,
                       .w = op.w,
                       .first_row = p.w_first + uint64_t(head) * p.w_head_rows,
                       .transposed = p.transposed != 0,
                       .y = data<float>(op.y) + size_t(head) * p.y_head_stride + p.copied,
                       .y_stride = p.y_stride};
  };
  const uint32_t block = head_block(product(0)), blocks = (p.out_cols + block - 1) / block;
  for_share(c, p.heads * blocks, [&](uint32_t item, uint32_t worker) {
    const HeadProduct of_head = product(item / blocks);
    const uint32_t first = item % blocks * block;
    multiply_head(of_head, first, dense_scratch(c, worker));
    for (uint32_t row = 0; row < rows && first == 0; ++row)
      std::memcpy(of_head.y - p.copied + size_t(row) * p.y_stride,
                  of_head.x + size_t(row) * p.x_stride + p.in_cols, p.copied * sizeof(float));
  });
}

}  // namespace thimble::cpu
