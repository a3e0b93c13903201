// short_conv: a causal convolution of each channel, with its last rows as state. A worker takes a block of
// channels.
#include "backends/cpu/mixer_kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {
namespace {

constexpr uint32_t kBlock = 128;  // channels; their weights take at most 4 KiB of stack

}  // namespace

void short_conv(const Context& c, const ShortConv& o) {
  const ShortConvParams& p = o.p;
  const uint32_t rows = c.step.n_rows, tail_rows = p.taps - 1;
  const float* const x = data<float>(o.x);
  const size_t slot_stride = o.tail.slot_stride / sizeof(float);
  float* const slots = data<float>(o.tail.block0);
  const float* const before =
      c.step.state_from == kNoState ? nullptr : slots + c.step.state_from * slot_stride;
  float* const after = slots + c.step.state_to * slot_stride;

  c.threads.run((p.channels + kBlock - 1) / kBlock, [&](uint32_t item, uint32_t) {
    const uint32_t first = item * kBlock, n = std::min(kBlock, p.channels - first);
    float w[kMostTaps][kBlock];
    for (uint32_t channel = 0; channel < n; ++channel)
      for (uint32_t j = 0; j < p.taps; ++j)
        w[j][channel] = data<float>(o.w)[size_t(first + channel) * p.taps + j];
    ConvolvedRow r{.n = n,
                   .x = {},
                   .times = {},
                   .taps = p.taps,
                   .w = w[0],
                   .w_stride = kBlock,
                   .bias = o.bias ? data<float>(o.bias) + first : nullptr,
                   .gate = nullptr,
                   .silu = p.act == kActSilu,
                   .y = nullptr};
    // The factors of u in row `row` - tail_rows of the step; the first rows are those of the tail.
    const auto take = [&](uint32_t j, uint32_t row) {
      r.times[j] = nullptr;
      if (row < tail_rows) {
        r.x[j] = before ? before + size_t(row) * p.channels + first : nullptr;
        return;
      }
      const float* of_row = x + size_t(row - tail_rows) * p.x_stride + first;
      r.x[j] = of_row + p.x_column;
      if (p.times_column != kNoColumn) r.times[j] = of_row + p.times_column;
    };
    for (uint32_t row = 0; row < rows; ++row) {
      for (uint32_t j = 0; j < p.taps; ++j) take(j, row + j);
      if (p.gate_column != kNoColumn) r.gate = x + size_t(row) * p.x_stride + p.gate_column + first;
      r.y = data<float>(o.y) + size_t(row) * p.y_stride + first;
      mixer_kernels().convolve(r);
    }
    // In ascending order, since both tails may be the same memory.
    for (uint32_t i = 0; i < tail_rows; ++i) {
      take(0, rows + i);
      for (uint32_t channel = 0; channel < n; ++channel)
        after[size_t(i) * p.channels + first + channel] =
            r.x[0] ? (r.times[0] ? r.x[0][channel] * r.times[0][channel] : r.x[0][channel]) : 0.0f;
    }
  });
}

}  // namespace thimble::cpu
