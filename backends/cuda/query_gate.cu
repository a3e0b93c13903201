// query_gate: whether this step's query is close enough to the one that made the cached selection.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {

constexpr uint32_t kThreads = 1024;

static __global__ void query_gate_kernel(const StepParams* step, uint32_t cols, const float* q, float* cached,
                                         GateState* gate) {
  begin_kernel();
  __shared__ float3 of_warp[kThreads / kWarp];
  // The three products take the same steps in the same order, so those of equal queries have equal bits.
  // Without a cached query they are worked out for nothing, which costs less than waiting for the gate first.
  float3 dot{0, 0, 0};  // q cached, q q, cached cached
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < cols; i += kThreads) {
    const float x = q[i], y = cached[i];
    dot = {__fmaf_rn(x, y, dot.x), __fmaf_rn(x, x, dot.y), __fmaf_rn(y, y, dot.z)};
  }
  dot = {warp_sum(dot.x), warp_sum(dot.y), warp_sum(dot.z)};
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = dot;
  const StepParams& s = *step;
  const GateState before = *gate;
  __syncthreads();
  dot = of_warp[threadIdx.x % kWarp];
  dot = {warp_sum(dot.x), warp_sum(dot.y), warp_sum(dot.z)};

  if (!selects(s)) {
    if (threadIdx.x == 0) gate->hit = gate->valid = 0;
    return;
  }
  bool hit = false;
  // More than half of the local window since the last miss: too many tokens have left it unseen.
  if (before.valid && before.generation == s.generation &&
      s.position - before.position <= static_cast<int32_t>(s.n_local / 2) && s.theta < 1) {
    // No division: equal queries give sqrt(x * x) = x and so hit for every theta below 1, zeros among them.
    const bool close = dot.x >= s.theta * sqrtf(dot.y * dot.z);
    hit = close || s.theta <= -1;
  }
  if (threadIdx.x == 0) {
    gate->hit = hit;
    if (hit) {
      gate->hits = before.hits + 1;
    } else {
      gate->misses = before.misses + 1;
      gate->valid = 1;
      gate->generation = s.generation;
      gate->position = s.position;
    }
  }
  if (hit) return;
  for (uint32_t i = threadIdx.x; i < cols; i += kThreads) cached[i] = q[i];
}

void query_gate(const Launch& l, const QueryGate& op) {
  launch(l, query_gate_kernel, 1, kThreads, 0, l.step, op.p.cols, data<float>(op.q), data<float>(op.cached),
         data<GateState>(op.gate));
}

}  // namespace thimble::cuda
