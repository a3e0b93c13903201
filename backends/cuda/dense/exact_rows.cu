// linear with x and W as they are (Linear::exact), for many rows and few columns, as the gates of recurrent
// layers have. A block computes 32 rows of x times 32 rows of W from shared memory, 64 columns at a time.
#include "backends/cuda/dense/exact_rows.h"
#include "backends/cuda/dense/formats.cuh"
#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kTile = 32, kDepth = 64, kThreads = 256;
constexpr uint32_t kEach = kTile / 16;  // rows of x and of W per thread
static_assert(kTile * kDepth == 8 * kThreads, "a thread loads eight elements of each");

struct ExactProduct {
  const float* x;
  const std::byte* w;
  const float* bias;  // or null
  float* y;
  uint64_t row_bytes;  // of W
  LinearParams p;
  float scale;  // of W
};

template <DType type>
__global__ void __launch_bounds__(kThreads) exact_rows_kernel(const StepParams* step, ExactProduct e) {
  __shared__ float x[kDepth][kTile + 1], w[kDepth][kTile + 1];
  begin_kernel();
  const LinearParams& p = e.p;
  const uint32_t rows = row_count(*step, p.rows), first_row = blockIdx.y * kTile,
                 first_col = blockIdx.x * kTile;
  if (first_row >= rows) return;
  // What the thread loads, and the first row of x and of W that it multiplies.
  const uint32_t loaded = threadIdx.x / 8, part = threadIdx.x % 8 * 8;
  const uint32_t row = threadIdx.x / 16, col = threadIdx.x % 16;
  float sums[kEach][kEach] = {};
  for (uint32_t first = 0; first < p.in_cols; first += kDepth) {
    const uint32_t c = first + part;
    const bool has_x = c < p.in_cols && first_row + loaded < rows,
               has_w = c < p.in_cols && first_col + loaded < p.out_cols;
    __syncthreads();
    if (has_x) {
      const EightFloats of = eight_of_floats(e.x + uint64_t(first_row + loaded) * p.x_stride, c, p.in_cols);
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) x[part + i][loaded] = of.v[i];
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) x[part + i][loaded] = 0;
    }
    if (has_w) {
      const auto of = eight_of_row<type>(e.w + uint64_t(first_col + loaded) * e.row_bytes, c, p.in_cols);
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) w[part + i][loaded] = of.at(i);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) w[part + i][loaded] = 0;
    }
    __syncthreads();
#pragma unroll 16
    for (uint32_t k = 0; k < kDepth; ++k)
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i)
#pragma unroll
        for (uint32_t j = 0; j < kEach; ++j)
          sums[i][j] = fmaf(x[k][row + 16 * i], w[k][col + 16 * j], sums[i][j]);
  }
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i)
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) {
      const uint32_t r = first_row + row + 16 * i, c = first_col + col + 16 * j;
      if (r >= rows || c >= p.out_cols) continue;
      float& y = e.y[uint64_t(r) * p.y_stride + c];
      const float product = sums[i][j] * e.scale + (e.bias ? e.bias[c] : 0);
      y = p.add ? y + product : product;
    }
}

}  // namespace

void multiply_exactly(const Launch& l, const Linear& op) {
  const dim3 blocks(static_cast<uint32_t>(ceil_div(op.p.out_cols, kTile)),
                    static_cast<uint32_t>(ceil_div(most_rows(l, op.p.rows), kTile)));
  launch(l, of_type(op.w.type, [](auto type) { return exact_rows_kernel<type()>; }), blocks, kThreads, 0,
         l.step,
         ExactProduct{.x = data<float>(op.x),
                      .w = data<std::byte>(op.w),
                      .bias = data<float>(op.bias),
                      .y = data<float>(op.y),
                      .row_bytes = dtype_bytes(op.w.type, op.w.cols),
                      .p = op.p,
                      .scale = op.w.scale});
}

}  // namespace thimble::cuda
