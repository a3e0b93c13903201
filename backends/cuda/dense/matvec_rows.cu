// Matrices of few rows of floats times a vector, as in a router. The tiles of eight rows of matvec.cu would
// leave most multiprocessors without work, so here a block computes a single row. A norm before the product
// needs no extra barrier, because its scale is a factor of the whole sum.
#include "backends/cuda/dense/matvec.h"
#include "backends/cuda/dense/matvec_formats.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp;
constexpr uint32_t kQuads = 4;  // per thread, in flight at once: 4,096 columns per block

struct RowMatrix {
  const float *w, *bias;  // bias: or null
  float* y;
  uint32_t first_block;  // whose row is row 0 of the matrix
  bool add;
};
struct RowProducts {
  const float* x;
  uint32_t cols, rows;  // rows: of x, kStepRows or kLogitRows
  const float* weight;  // of the norm, or null
  float* norm_y;
  float norm_eps;
  RowMatrix matrix[kMostSiblings];
};

__device__ float4 product(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
__device__ float sum_of(float4 a) { return (a.x + a.y) + (a.z + a.w); }

__global__ void __launch_bounds__(kThreads)
    multiply_rows_kernel(const StepParams* step, const __grid_constant__ RowProducts p) {
  release_successor();
  __shared__ float2 of_warps[kWarps];
  uint32_t of = 0;
#pragma unroll
  for (uint32_t i = 1; i < kMostSiblings; ++i) of += blockIdx.x >= p.matrix[i].first_block;
  const RowMatrix& m = p.matrix[of];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, row = blockIdx.x - m.first_block;
  const float* const w = m.w + uint64_t(row) * p.cols;
  const bool exists = row_count(*step, p.rows) > 0;
  float4 weights[kQuads];  // of W, multiplied by the norm's
  const auto column = [&](uint32_t first, uint32_t i) { return first + 4 * (i * kThreads + threadIdx.x); };
  const auto fetch = [&](uint32_t first) {
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) weights[i] = matvec::quad_of(w, column(first, i), p.cols);
    if (!p.weight) return;
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i)
      weights[i] = product(weights[i], matvec::quad_of(p.weight, column(first, i), p.cols));
  };
  fetch(0);
  const float bias = m.bias ? m.bias[row] : 0;
  await_predecessor();
  if (!exists) return;
  const float before = m.add ? m.y[row] : 0;
  float sum = 0, squares = 0;
  for (uint32_t first = 0; first < p.cols; first += 4 * kQuads * kThreads) {
    if (first > 0) fetch(first);
    float4 x[kQuads];
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) x[i] = matvec::quad_of(p.x, column(first, i), p.cols);
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) {
      sum += sum_of(product(x[i], weights[i]));
      squares += sum_of(product(x[i], x[i]));
    }
  }
  sum = warp_sum(sum);
  squares = warp_sum(squares);
  if (lane == 0) of_warps[warp] = {sum, squares};
  __syncthreads();
  const float2 own = lane < kWarps ? of_warps[lane] : float2{};
  const float scale = p.weight ? rms_scale(warp_sum(own.y), p.cols, p.norm_eps) : 1;
  sum = warp_sum(own.x) * scale + bias + before;
  if (threadIdx.x == 0) m.y[row] = sum;
  if (!p.weight || blockIdx.x != gridDim.x - 1) return;
  // The last block stores the result of the norm for ops that read it later.
  for (uint32_t c = threadIdx.x; c < p.cols; c += kThreads) p.norm_y[c] = p.x[c] * scale * p.weight[c];
}

}  // namespace

bool multiplies_by_rows(const Launch& l, std::span<const Linear> siblings) {
  uint32_t rows = 0;
  for (const Linear& op : siblings) {
    if (op.w.type != DType::kF32 || op.w.scale != 1) return false;
    rows += op.p.out_cols;
  }
  return l.max_rows == 1 && rows <= 2 * l.card.multiprocessors;
}

void multiply_by_rows(const Launch& l, std::span<const Linear> siblings, const RmsNorm* norm) {
  const Linear& first = siblings[0];
  RowProducts p{.x = data<float>(norm ? norm->x : first.x),
                .cols = first.p.in_cols,
                .rows = first.p.rows,
                .weight = norm ? data<float>(norm->weight) : nullptr,
                .norm_y = norm ? data<float>(norm->y) : nullptr,
                .norm_eps = norm ? norm->p.eps : 0,
                .matrix = {}};
  uint32_t blocks = 0;
  for (uint32_t i = 0; i < kMostSiblings; ++i) {
    p.matrix[i].first_block = ~0u;
    if (i >= siblings.size()) continue;
    const Linear& op = siblings[i];
    p.matrix[i] = {.w = data<float>(op.w),
                   .bias = data<float>(op.bias),
                   .y = data<float>(op.y),
                   .first_block = blocks,
                   .add = op.p.add != 0};
    blocks += op.p.out_cols;
  }
  launch(l, multiply_rows_kernel, blocks, kThreads, 0, l.step, p);
}

}  // namespace thimble::cuda
