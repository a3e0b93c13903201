// sink_score: the softmax weight of a token's key among sink logits, averaged over the queries of its KV
// head. A warp processes one KV head of a row; its lanes divide the channels of a norm and the sinks.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kWarps = 8;  // per block

// The factor that scales the root mean square of x to 1.
__device__ float norm_scale(const float* x, const SinkScoreParams& p) {
  float squares = 0;
  for (uint32_t c = threadIdx.x; c < p.width; c += kWarp) squares += x[c] * x[c];
  return rms_scale(warp_sum(squares), p.width, p.eps);
}

__global__ void __launch_bounds__(kWarp* kWarps)
    sink_score_kernel(const StepParams* step, SinkScoreParams p, const float* q, const float* k,
                      const float* __restrict__ q_norm, const float* __restrict__ k_norm,
                      const float* __restrict__ sinks, const float* __restrict__ bias, float* score) {
  begin_kernel();
  const uint32_t i = blockIdx.x * kWarps + threadIdx.y, head = i % p.heads, lane = threadIdx.x;
  if (i >= step->n_rows * p.heads) return;
  k += uint64_t(i) * p.width;
  sinks += uint64_t(head) * p.sinks * p.width;
  const float k_scale = norm_scale(k, p);
  float sum = 0;
  for (uint32_t g = 0; g < p.group; ++g) {
    const float* query = q + (uint64_t(i) * p.group + g) * p.width;
    const float scale = norm_scale(query, p) * p.scale;
    float own = 0;
    for (uint32_t c = lane; c < p.width; c += kWarp) own += query[c] * q_norm[c] * (k[c] * k_norm[c]);
    own = warp_sum(own) * scale * k_scale + bias[head * p.group + g];
    const auto product = [&](uint32_t sink) {
      float z = 0;
      for (uint32_t c = 0; c < p.width; ++c) z += query[c] * q_norm[c] * sinks[sink * p.width + c];
      return z * scale;
    };
    float peak = own;
    for (uint32_t s = lane; s < p.sinks; s += kWarp) peak = fmaxf(peak, product(s));
    peak = warp_max(peak);
    const float weight = expf(own - peak);
    float others = 0;
    for (uint32_t s = lane; s < p.sinks; s += kWarp) others += expf(product(s) - peak);
    sum += weight / (weight + warp_sum(others));
  }
  if (lane == 0) score[i] = sum / static_cast<float>(p.group);
}

}  // namespace

void sink_score(const Launch& l, const SinkScore& op) {
  const uint32_t blocks = static_cast<uint32_t>(ceil_div(uint64_t(l.max_rows) * op.p.heads, kWarps));
  launch(l, sink_score_kernel, blocks, dim3(kWarp, kWarps), 0, l.step, op.p, data<float>(op.q),
         data<float>(op.k), data<float>(op.q_norm), data<float>(op.k_norm), data<float>(op.sinks),
         data<float>(op.bias), data<float>(op.score));
}

}  // namespace thimble::cuda
