// short_conv: a causal convolution of each channel. A thread computes kRows rows of a channel, and reads each
// u once. The threads of the first rows also write the tail. They alone read it, so both may be the same
// memory.
#include <iterator>

#include "backends/cuda/gate.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 64, kRows = 8;
static_assert(kRows >= kMostTaps - 1, "later rows do not reach the tail");

template <uint32_t kTaps>
__global__ void __launch_bounds__(kThreads)
    short_conv_kernel(const StepParams* step, ShortConvParams p, const float* x, const float* w,
                      const float* bias, float* slots, uint64_t slot_stride, float* y) {
  constexpr uint32_t kTailRows = kTaps - 1;
  const uint32_t channel = blockIdx.x * kThreads + threadIdx.x, first = blockIdx.y * kRows;
  float weights[kTaps], start = 0;
  if (channel < p.channels) {
#pragma unroll
    for (uint32_t j = 0; j < kTaps; ++j) weights[j] = w[uint64_t(channel) * kTaps + j];
    if (bias) start = bias[channel];
  }
  const StepParams s = begin_kernel(step);
  if (channel >= p.channels || (first > 0 && first >= s.n_rows)) return;

  const float* before = s.state_from == kNoState ? nullptr : slots + s.state_from * slot_stride + channel;
  float* after = slots + s.state_to * slot_stride + channel;
  const bool times = p.times_column != kNoColumn, gated = p.gate_column != kNoColumn;
  // u of row `row` - kTailRows of the step; the first ones are those of the tail.
  const auto read_u = [&](uint32_t row) {
    if (row < kTailRows) return before ? before[uint64_t(row) * p.channels] : 0.0f;
    const float* of_row = x + uint64_t(row - kTailRows) * p.x_stride + channel;
    return times ? of_row[p.x_column] * of_row[p.times_column] : of_row[p.x_column];
  };

  const uint32_t rows = min(s.n_rows - first, kRows);
  float u[kRows + kTailRows], gates[kRows];
#pragma unroll
  for (uint32_t i = 0; i < kRows + kTailRows; ++i)
    if (i < rows + kTailRows) u[i] = read_u(first + i);
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i)
    if (i < rows) gates[i] = gated ? x[uint64_t(first + i) * p.x_stride + p.gate_column + channel] : 1.0f;
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i) {
    if (i >= rows) break;
    float sum = start;
#pragma unroll
    for (uint32_t j = 0; j < kTaps; ++j) sum += weights[j] * u[i + j];
    y[uint64_t(first + i) * p.y_stride + channel] = gates[i] * (p.act == kActSilu ? silu(sum) : sum);
  }
  if (first > 0) return;
  // In ascending order, since a row may become an earlier row of the same memory.
  for (uint32_t i = 0; i < kTailRows; ++i) after[uint64_t(i) * p.channels] = read_u(s.n_rows + i);
}

}  // namespace

void short_conv(const Launch& l, const ShortConv& op) {
  constexpr decltype(&short_conv_kernel<2>) kOfTaps[] = {
      short_conv_kernel<2>, short_conv_kernel<3>, short_conv_kernel<4>, short_conv_kernel<5>,
      short_conv_kernel<6>, short_conv_kernel<7>, short_conv_kernel<8>};
  static_assert(std::size(kOfTaps) == kMostTaps - 1);
  const dim3 blocks(static_cast<uint32_t>(ceil_div(op.p.channels, kThreads)),
                    static_cast<uint32_t>(ceil_div(l.max_rows, kRows)));
  launch(l, kOfTaps[op.p.taps - 2], blocks, kThreads, 0, l.step, op.p, data<float>(op.x), data<float>(op.w),
         data<float>(op.bias), data<float>(op.tail.block0), op.tail.slot_stride / sizeof(float),
         data<float>(op.y));
}

}  // namespace thimble::cuda
