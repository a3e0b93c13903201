#include "backends/cpu/dense/matmul.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void glu(const Context& c, const Glu& op) {
  const uint32_t rows = c.step.n_rows;
  const DigitBlock* const digits =
      take_digits(c, c.threads.size() * kDenseScratch * sizeof(float), {op.gate.type, op.up.type},
                  data<float>(op.x), op.p.in_cols, rows, op.p.in_cols);
  const Blocks blocks(rows, op.p.out_cols, c.threads.size(), digits);
  for_share(c, blocks.count(), [&](uint32_t item, uint32_t worker) {
    const Blocks::Block b = blocks[item];
    float* scratch = dense_scratch(c, worker);
    float* h = data<float>(op.h) + size_t(b.first_row) * op.p.out_cols + b.first_col;
    float* up = scratch + kMatmulScratch;
    // The gate is written where h will be. Only a block of the second product needs its own memory.
    const auto product = [&](const Weight& w, float* y, size_t y_stride) {
      matmul({.x = data<float>(op.x) + size_t(b.first_row) * op.p.in_cols,
              .x_stride = op.p.in_cols,
              .x_rows = b.rows,
              .type = w.type,
              .w = data<std::byte>(w) + b.first_col * dtype_bytes(w.type, op.p.in_cols),
              .cols = b.cols,
              .n = op.p.in_cols,
              .y = y,
              .y_stride = y_stride,
              .accumulate = false,
              .digits = digits},
             scratch);
      scale_block(w.scale, b.rows, b.cols, y, y_stride);
    };
    product(op.gate, h, op.p.out_cols);
    product(op.up, up, b.cols);
    for (uint32_t r = 0; r < b.rows; ++r)
      kernels().activate(op.p.act, h + size_t(r) * op.p.out_cols, up + size_t(r) * b.cols, b.cols);
  });
}

}  // namespace thimble::cpu
