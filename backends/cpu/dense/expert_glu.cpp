#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu/dense/experts.h"

namespace thimble::cpu {

// gpt-oss: a sigmoid(1.702 a) (b + 1) with a = min(gate, 7) and b = clamp(up, -7, 7).
static void activate_clamped(float* gate, const float* up, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    const float a = std::min(gate[i], 7.0f), b = std::clamp(up[i], -7.0f, 7.0f);
    gate[i] = a / (1 + std::exp(-1.702f * a)) * (b + 1);
  }
}

void expert_glu(const Context& c, const ExpertGlu& op) {
  const ExpertGluParams& p = op.p;
  const uint32_t* first = data<uint32_t>(op.first);
  const uint32_t blocks = (p.out_cols + kBlockCols - 1) / kBlockCols;
  const DigitBlock* const digits =
      take_digits(c, c.threads.size() * expert_scratch(p.in_cols) * sizeof(float), {op.gate.type, op.up.type},
                  data<float>(op.x), p.in_cols, c.step.n_rows, p.in_cols);
  // Rows of digits are not gathered.
  const uint32_t most = digits ? 1 : kExpertRows;
  c.threads.run(p.experts * blocks, [&](uint32_t item, uint32_t worker) {
    const uint32_t expert = item / blocks, col = item % blocks * kBlockCols;
    const uint32_t cols = std::min(kBlockCols, p.out_cols - col);
    const ExpertScratch scratch(c, worker, p.in_cols);
    const ExpertProduct gate{op.gate, expert, p.out_cols, col, cols, p.in_cols},
        up{op.up, expert, p.out_cols, col, cols, p.in_cols};
    const uint64_t bias = uint64_t(expert) * p.out_cols + col;
    for (uint32_t slot = first[expert]; slot < first[expert + 1]; slot += most) {
      const uint32_t n = std::min(most, first[expert + 1] - slot);
      const DigitBlock* const x =
          digits ? digits + data<uint32_t>(op.row)[slot] * digit_blocks(p.in_cols) : nullptr;
      for (uint32_t r = 0; r < n; ++r)
        std::memcpy(scratch.rows + size_t(r) * p.in_cols,
                    data<float>(op.x) + size_t(data<uint32_t>(op.row)[slot + r]) * p.in_cols,
                    p.in_cols * sizeof(float));
      float* h = data<float>(op.h) + size_t(slot) * p.out_cols + col;
      gate(scratch.rows, x, n, h, p.out_cols, scratch.matmul);
      up(scratch.rows, x, n, scratch.block, cols, scratch.matmul);
      add_bias(op.gate_bias, bias, n, cols, h, p.out_cols);
      add_bias(op.up_bias, bias, n, cols, scratch.block, cols);
      for (uint32_t r = 0; r < n; ++r, h += p.out_cols)
        if (const float* other = scratch.block + size_t(r) * cols; p.act == kActClamped)
          activate_clamped(h, other, cols);
        else
          kernels().activate(p.act, h, other, cols);
    }
  });
}

}  // namespace thimble::cpu
