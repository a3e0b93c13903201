#include "backends/cpu/dense/experts.h"

namespace thimble::cpu {

// Each worker takes columns of y, so that the experts' contributions to a row are added in order.
void expert_linear(const Context& c, const ExpertLinear& op) {
  const ExpertLinearParams& p = op.p;
  const uint32_t* first = data<uint32_t>(op.first);
  const DigitBlock* const digits =
      take_digits(c, c.threads.size() * expert_scratch(0) * sizeof(float), {op.w.type}, data<float>(op.h),
                  p.in_cols, first[p.experts], p.in_cols);
  const uint32_t block_cols = expert_cols(p.out_cols, c.threads.size(), digits);
  for_share(c, (p.out_cols + block_cols - 1) / block_cols, [&](uint32_t block, uint32_t worker) {
    const uint32_t col = block * block_cols, cols = std::min(block_cols, p.out_cols - col);
    const ExpertScratch scratch(c, worker, 0);
    for (uint32_t expert = 0; expert < p.experts; ++expert)
      for (uint32_t slot = first[expert]; slot < first[expert + 1]; slot += kExpertRows) {
        const uint32_t n = std::min(kExpertRows, first[expert + 1] - slot);
        const ExpertProduct product{op.w, op.scale, expert, p.out_cols, col, cols, p.in_cols};
        product(data<float>(op.h) + size_t(slot) * p.in_cols,
                digits ? digits + slot * digit_blocks(p.in_cols) : nullptr, n, scratch.block, cols,
                scratch.matmul);
        add_bias(op.bias, uint64_t(expert) * p.out_cols + col, n, cols, scratch.block, cols);
        for (uint32_t r = 0; r < n; ++r) {
          const float weight = data<float>(op.weight)[slot + r];
          float* y = data<float>(op.y) + size_t(data<uint32_t>(op.row)[slot + r]) * p.out_cols + col;
          for (uint32_t i = 0; i < cols; ++i) y[i] += weight * scratch.block[size_t(r) * cols + i];
        }
      }
  });
}

}  // namespace thimble::cpu
