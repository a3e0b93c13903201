// arg_max: the column of each row's largest element, the lower one if several are equal; -1 if any element is
// not finite.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/order.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kParts = 4 * kWarp;  // blocks per row: about the number of multiprocessors

// The best element of a part of a row: its order_bits, then the complement of its column. 0 means that the
// part is empty. A non-finite element beats all others, and its column is -1.
using Best = unsigned long long;
constexpr Best kNotFinite = Best(~0u) << 32;
static_assert(~static_cast<uint32_t>(kNotFinite) == ~0u);

__device__ Best best_of(float x, uint32_t column) {
  return fabsf(x) < kInfinity ? Best(order_bits(x)) << 32 | ~column : kNotFinite;
}

__device__ Best warp_best(Best best) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) best = max(best, __shfl_xor_sync(~0u, best, offset));
  return best;
}

__global__ void __launch_bounds__(kThreads)
    part_kernel(const StepParams* step, uint32_t cols, const float* x, Best* bests) {
  begin_kernel();
  const uint32_t part = blockIdx.x, row = blockIdx.y;
  if (row >= step->n_logit_rows) return;
  const float* from = x + uint64_t(row) * cols;
  Best best = 0;
#pragma unroll 8
  for (uint32_t c = part * kThreads + threadIdx.x; c < cols; c += kParts * kThreads)
    best = max(best, best_of(from[c], c));
  best = warp_best(best);
  __shared__ Best warps[kThreads / kWarp];
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  best = warp_best(threadIdx.x < kThreads / kWarp ? warps[threadIdx.x] : 0);
  if (threadIdx.x == 0) bests[row * kParts + part] = best;
}

__global__ void __launch_bounds__(kWarp)
    merge_kernel(const StepParams* step, const Best* bests, int32_t* index) {
  begin_kernel();
  const uint32_t row = blockIdx.x;
  if (row >= step->n_logit_rows) return;
  Best best = 0;
#pragma unroll
  for (uint32_t part = threadIdx.x; part < kParts; part += kWarp)
    best = max(best, bests[row * kParts + part]);
  best = warp_best(best);
  if (threadIdx.x == 0) index[row] = static_cast<int32_t>(~static_cast<uint32_t>(best));
}

}  // namespace

void arg_max(const Launch& l, const ArgMax& op) {
  const uint32_t rows = most_rows(l, kLogitRows);
  Best* bests = reinterpret_cast<Best*>(l.scratch);
  launch(l, part_kernel, dim3(kParts, rows), kThreads, 0, l.step, op.p.cols, data<float>(op.x), bests);
  launch(l, merge_kernel, rows, kWarp, 0, l.step, bests, data<int32_t>(op.index));
}

uint64_t arg_max_scratch(const ModelShape&, const SessionShape&, const Card&) {
  Launch any;
  any.max_rows = UINT32_MAX;
  return uint64_t(most_rows(any, kLogitRows)) * kParts * sizeof(Best);
}

}  // namespace thimble::cuda
