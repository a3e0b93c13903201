// log_prob: log softmax of each row at its target.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 1024;

// Reduces the values of all threads with `combine`; every thread gets the result.
template <typename T, typename Combine>
__device__ T block_reduce(T x, const Combine& combine) {
  __shared__ T warps[kThreads / kWarp];
  const auto warp_reduce = [&] {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) x = combine(x, __shfl_xor_sync(~0u, x, offset));
  };
  warp_reduce();
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = warps[threadIdx.x % kWarp];
  warp_reduce();
  return x;
}

__global__ void __launch_bounds__(kThreads)
    log_prob_kernel(const StepParams* step, uint32_t cols, const float* x, const int32_t* target, float* y) {
  begin_kernel();
  const uint32_t row = blockIdx.x;
  if (row >= step->n_logit_rows) return;
  const float* from = x + uint64_t(row) * cols;
  float largest = -kInfinity;
#pragma unroll 8
  for (uint32_t c = threadIdx.x; c < cols; c += kThreads) largest = fmaxf(largest, from[c]);
  largest = block_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
  // Pieces short enough that summing floats loses nothing that matters.
  constexpr uint32_t kPiece = 16 * kThreads;
  double total = 0;
  for (uint32_t first = threadIdx.x; first < cols; first += kPiece) {
    float sum = 0;
#pragma unroll
    for (uint32_t c = 0; c < kPiece; c += kThreads)
      if (first + c < cols) sum += expf(from[first + c] - largest);
    total += static_cast<double>(sum);
  }
  total = block_reduce(total, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0)
    y[row] = static_cast<float>(static_cast<double>(from[target[row]]) - static_cast<double>(largest) -
                                log(total));
}

}  // namespace

void log_prob(const Launch& l, const LogProb& op) {
  launch(l, log_prob_kernel, most_rows(l, kLogitRows), kThreads, 0, l.step, op.p.cols, data<float>(op.x),
         data<int32_t>(op.target), data<float>(op.y));
}

}  // namespace thimble::cuda
