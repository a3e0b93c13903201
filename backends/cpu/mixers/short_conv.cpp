// short_conv: a causal convolution of each channel between two gates, with its last rows as state.
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void short_conv(const Context& c, const ShortConv& o) {
  const ShortConvParams& p = o.p;
  const uint32_t rows = c.step.n_rows, tail_rows = p.taps - 1;
  const float *x = data<float>(o.x), *w = data<float>(o.w);
  const size_t slot_stride = o.tail.slot_stride / sizeof(float);
  float* const slots = data<float>(o.tail.block0);
  const float* before = c.step.state_from == kNoState ? nullptr : slots + c.step.state_from * slot_stride;
  float* after = slots + c.step.state_to * slot_stride;

  // u of row `row` - tail_rows of the step; the first ones are those of the tail.
  const auto u = [&](uint32_t row, uint32_t channel) {
    if (row < tail_rows) return before ? before[size_t(row) * p.channels + channel] : 0.0f;
    const float* of_row = x + size_t(row - tail_rows) * p.x_stride + channel;
    return of_row[p.x_column] * of_row[p.times_column];
  };
  for_rows(c, rows, p.channels * p.taps, [&](uint32_t row) {
    for (uint32_t channel = 0; channel < p.channels; ++channel) {
      float sum = 0;
      for (uint32_t j = 0; j < p.taps; ++j) sum += w[size_t(channel) * p.taps + j] * u(row + j, channel);
      data<float>(o.y)[size_t(row) * p.y_stride + channel] =
          x[size_t(row) * p.x_stride + p.gate_column + channel] * sum;
    }
  });
  // In ascending order, since both tails may be the same memory.
  for (uint32_t i = 0; i < tail_rows; ++i)
    for (uint32_t channel = 0; channel < p.channels; ++channel)
      after[size_t(i) * p.channels + channel] = u(rows + i, channel);
}

}  // namespace thimble::cpu
