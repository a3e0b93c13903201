// gated_norm: an RMS norm of each vector before or after its gate, or the gate alone.
#include <algorithm>

#include "backends/cuda/dense/row_sum.cuh"
#include "backends/cuda/gate.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kMostThreads = 1024;
constexpr uint32_t kHeld = 4;  // elements that a thread reads once and keeps; it reads further ones twice

// A row of threads processes a vector.
__global__ void __launch_bounds__(kMostThreads)
    gated_norm_kernel(const StepParams* step, GatedNormParams p, const float* x, const float* z,
                      const float* weight, float* y) {
  const StepParams s = begin_kernel(step);
  const uint32_t vector = blockIdx.x * blockDim.y + threadIdx.y, row = vector / p.groups;
  if (row >= s.n_rows) return;
  const uint64_t first = uint64_t(vector % p.groups) * p.cols;
  x += row * uint64_t(p.row_stride) + first;
  y += row * uint64_t(p.row_stride) + first;
  z += row * uint64_t(p.z_stride) + p.z_column + first;
  if (weight && p.weight_per_group) weight += first;

  // An element before the norm, and what it is multiplied by after the norm.
  struct Element {
    float x, factor;
  };
  const auto read = [&](uint32_t c) -> Element {
    const float gate = p.act == kActSilu ? silu(z[c]) : sigmoid(z[c]), w = weight ? weight[c] : 1.0f;
    return p.order == kNormThenGate ? Element{x[c], w * gate} : Element{x[c] * gate, w};
  };
  Element held[kHeld];
  float sum = 0;
#pragma unroll
  for (uint32_t j = 0; j < kHeld; ++j)
    if (const uint32_t c = threadIdx.x + j * blockDim.x; c < p.cols) {
      held[j] = read(c);
      sum += held[j].x * held[j].x;
    }
  for (uint32_t c = threadIdx.x + kHeld * blockDim.x; c < p.cols; c += blockDim.x) {
    const float of = read(c).x;
    sum += of * of;
  }
  const float scale = p.order == kGateOnly ? 1.0f : rms_scale(row_sum(sum), p.cols, p.eps);
#pragma unroll
  for (uint32_t j = 0; j < kHeld; ++j)
    if (const uint32_t c = threadIdx.x + j * blockDim.x; c < p.cols)
      y[c] = held[j].x * scale * held[j].factor;
  for (uint32_t c = threadIdx.x + kHeld * blockDim.x; c < p.cols; c += blockDim.x) {
    const Element of = read(c);
    y[c] = of.x * scale * of.factor;
  }
}

}  // namespace

void gated_norm(const Launch& l, const GatedNorm& op) {
  const uint32_t vectors = l.max_rows * op.p.groups;
  const uint32_t width =
      std::min(static_cast<uint32_t>(round_up(ceil_div(op.p.cols, kHeld), kWarp)), kMostThreads);
  const uint32_t height = width == kWarp ? 8 : 1;  // short vectors, such as those of heads, share a block
  launch(l, gated_norm_kernel, static_cast<uint32_t>(ceil_div(vectors, height)), dim3(width, height), 0,
         l.step, op.p, data<float>(op.x), data<float>(op.z), data<float>(op.weight), data<float>(op.y));
}

}  // namespace thimble::cuda
