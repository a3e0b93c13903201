// gate: multiplies each channel by the sigmoid of a number. A thread takes a channel, or four.
#include "backends/cuda/gate.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 128;

template <bool kFour>
__global__ void __launch_bounds__(kThreads)
    gate_kernel(const StepParams* step, GateParams p, const float* g, float* x) {
  constexpr uint32_t kEach = kFour ? 4 : 1;
  const StepParams s = begin_kernel(step);
  const uint32_t row = blockIdx.y, i = (blockIdx.x * kThreads + threadIdx.x) * kEach;
  if (row >= s.n_rows || i >= p.groups * p.cols) return;
  const uint32_t group = i / p.cols, channel = p.g_cols == 1 ? 0 : i % p.cols;
  const float* of =
      g + uint64_t(row) * p.g_stride + p.g_column + uint64_t(group) * p.g_group_stride + channel;
  x += uint64_t(row) * p.x_stride + i;
  if constexpr (kFour) {
    const float4 by = p.g_cols == 1 ? float4{*of, *of, *of, *of} : *reinterpret_cast<const float4*>(of);
    float4& to = *reinterpret_cast<float4*>(x);
    const float4 from = to;
    to = {from.x * sigmoid(by.x), from.y * sigmoid(by.y), from.z * sigmoid(by.z), from.w * sigmoid(by.w)};
  } else {
    *x *= sigmoid(*of);
  }
}

}  // namespace

void gate(const Launch& l, const Gate& op) {
  const GateParams& p = op.p;
  const float* const g = data<float>(op.g);
  float* const x = data<float>(op.x);
  const bool gates_apart = p.g_cols != 1;
  const bool four = (p.cols | p.x_stride) % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 &&
                    (!gates_apart || ((p.g_stride | p.g_column | p.g_group_stride) % 4 == 0 &&
                                      reinterpret_cast<uintptr_t>(g) % 16 == 0));
  const uint32_t of_block = kThreads * (four ? 4 : 1);
  const dim3 blocks(static_cast<uint32_t>(ceil_div(p.groups * p.cols, of_block)), l.max_rows);
  launch(l, four ? gate_kernel<true> : gate_kernel<false>, blocks, kThreads, 0, l.step, p, g, x);
}

}  // namespace thimble::cuda
