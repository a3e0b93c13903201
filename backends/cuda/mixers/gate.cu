// gate: multiplies each channel by the sigmoid of a number. A thread takes a channel.
#include "backends/cuda/mixers/gate.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    gate_kernel(const StepParams* step, GateParams p, const float* g, float* x) {
  const StepParams s = begin_kernel(step);
  const uint32_t row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (row >= s.n_rows || i >= p.groups * p.cols) return;
  const uint32_t group = i / p.cols, channel = p.g_cols == 1 ? 0 : i % p.cols;
  const float of = g[uint64_t(row) * p.g_stride + p.g_column + uint64_t(group) * p.g_group_stride + channel];
  x[uint64_t(row) * p.x_stride + i] *= sigmoid(of);
}

}  // namespace

void gate(const Launch& l, const Gate& op) {
  const dim3 blocks(static_cast<uint32_t>(ceil_div(op.p.groups * op.p.cols, kThreads)), l.max_rows);
  launch(l, gate_kernel, blocks, kThreads, 0, l.step, op.p, data<float>(op.g), data<float>(op.x));
}

}  // namespace thimble::cuda
