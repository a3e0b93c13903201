// activation: silu or a gelu of every element, in place, times another element.
#include "backends/cuda/dense/activation.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kElements = 4;  // per thread

__device__ float gelu_erf(float x) { return 0.5f * x * erfcf(-0.707106781f * x); }  // 1 / sqrt(2)

__global__ void activation_kernel(const StepParams* step, ActivationParams p, float* x, const float* times) {
  begin_kernel();
  const uint64_t n = uint64_t(step->n_rows) * p.cols,
                 first = uint64_t(blockIdx.x) * kElements * kThreads + threadIdx.x;
#pragma unroll
  for (uint32_t j = 0; j < kElements; ++j)
    if (const uint64_t i = first + j * kThreads; i < n)
      x[i] = (p.act == kActGeluErf   ? gelu_erf(x[i])
              : p.act == kActReluSqr ? relu_of(x[i], x[i])
                                     : activated(x[i], p.act)) *
             (times ? times[i] : 1);
}

}  // namespace

void activation(const Launch& l, const Activation& op) {
  const uint32_t blocks =
      static_cast<uint32_t>(ceil_div(uint64_t(l.max_rows) * op.p.cols, kElements * kThreads));
  launch(l, activation_kernel, blocks, kThreads, 0, l.step, op.p, data<float>(op.x), data<float>(op.times));
}

}  // namespace thimble::cuda
