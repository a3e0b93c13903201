#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu/dense/experts.h"

namespace thimble::cpu {

// The activation of gpt-oss: a sigmoid(1.702 a) (b + 1) with a = min(gate, 7) and b = clamp(up, -7, 7).
static void activate_clamped(float* gate, const float* up, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    const float a = std::min(gate[i], 7.0f), b = std::clamp(up[i], -7.0f, 7.0f);
    gate[i] = a / (1 + std::exp(-1.702f * a)) * (b + 1);
  }
}

// The expert that owns a slot: first[e] <= slot < first[e + 1].
static uint32_t expert_of(const uint32_t* first, uint32_t experts, uint32_t slot) {
  return static_cast<uint32_t>(std::upper_bound(first, first + experts, slot) - first - 1);
}

void expert_glu(const Context& c, const ExpertGlu& op) {
  const ExpertGluParams& p = op.p;
  const uint32_t* first = data<uint32_t>(op.first);
  const DigitBlock* const digits =
      take_digits(c, c.threads.size() * expert_scratch(p.in_cols) * sizeof(float),
                  {op.gate ? op.gate.type : op.up.type, op.up.type}, data<float>(op.x), p.in_cols,
                  c.step.n_rows, p.in_cols);
  // With digits rows are not gathered, so an item is one slot and experts without slots have no items.
  // Otherwise an item is an expert.
  const uint32_t most = digits ? 1 : kExpertRows, items = digits ? first[p.experts] : p.experts;
  const uint32_t block_cols = expert_cols(uint64_t(items) * p.out_cols, c.threads.size(), digits);
  const uint32_t blocks = (p.out_cols + block_cols - 1) / block_cols;
  for_share(c, items * blocks, [&](uint32_t item, uint32_t worker) {
    const uint32_t index = item / blocks, col = item % blocks * block_cols;
    const uint32_t cols = std::min(block_cols, p.out_cols - col);
    const uint32_t expert = digits ? expert_of(first, p.experts, index) : index,
                   begin = digits ? index : first[index], end = digits ? index + 1 : first[index + 1];
    const ExpertScratch scratch(c, worker, p.in_cols);
    const uint32_t matrix_rows = p.out_cols + p.rows_between;
    const ExpertProduct gate{op.gate, op.gate_scale, expert, matrix_rows, col, cols, p.in_cols},
        up{op.up, op.up_scale, expert, matrix_rows, col, cols, p.in_cols};
    const uint64_t bias = uint64_t(expert) * p.out_cols + col;
    const auto row_of = [&](uint32_t slot) { return data<uint32_t>(op.row)[slot]; };
    for (uint32_t slot = begin; slot < end; slot += most) {
      const uint32_t n = std::min(most, end - slot);
      const float* x = data<float>(op.x) + size_t(row_of(slot)) * p.in_cols;
      if (!digits) {
        for (uint32_t r = 0; r < n; ++r)
          std::memcpy(scratch.rows + size_t(r) * p.in_cols,
                      data<float>(op.x) + size_t(row_of(slot + r)) * p.in_cols, p.in_cols * sizeof(float));
        x = scratch.rows;
      }
      const DigitBlock* const digits_of_x =
          digits ? digits + row_of(slot) * digit_blocks(p.in_cols) : nullptr;
      float* h = data<float>(op.h) + size_t(slot) * p.out_cols + col;
      if (!op.gate) {
        up(x, digits_of_x, n, h, p.out_cols, scratch.matmul);
        add_bias(op.up_bias, bias, n, cols, h, p.out_cols);
        for (uint32_t r = 0; r < n; ++r, h += p.out_cols) kernels().activate(p.act, h, nullptr, cols);
        continue;
      }
      gate(x, digits_of_x, n, h, p.out_cols, scratch.matmul);
      up(x, digits_of_x, n, scratch.block, cols, scratch.matmul);
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
