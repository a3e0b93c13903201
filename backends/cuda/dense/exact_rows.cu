// linear with x and W as they are (Linear::exact), for many rows and few columns, as the gates of recurrent
// layers have. A block computes 16 rows of x times 32 rows of W from shared memory, 128 columns at a time.
#include <algorithm>

#include "backends/cuda/dense/exact_rows.h"
#include "backends/cuda/dense/formats.cuh"
#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kRows = 16, kCols = 32, kDepth = 128, kThreads = 128;
// A thread multiplies two rows of x with two of W. The rows of a warp's lanes are in different banks, and a
// load of four columns serves all lanes that read it.
constexpr uint32_t kEach = 2, kStride = kDepth + 4;

struct ExactProduct {
  const std::byte* w;
  const float* bias;  // or null
  float* y;
  uint64_t row_bytes;  // of W
  uint32_t out_cols, y_stride;
  bool add;
  float scale;  // of W
};
struct ExactProducts {
  const float* x;
  uint32_t in_cols, x_stride, rows;  // rows: kStepRows, kLogitRows
  ExactProduct product[kMostSiblings];
};

__device__ void store_eight(float* to, const EightFloats& of) {
  reinterpret_cast<float4*>(to)[0] = {of.v[0], of.v[1], of.v[2], of.v[3]};
  reinterpret_cast<float4*>(to)[1] = {of.v[4], of.v[5], of.v[6], of.v[7]};
}
__device__ float product_of(float sum, float4 a, float4 b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

template <DType type>
__global__ void __launch_bounds__(kThreads)
    exact_rows_kernel(const StepParams* step, const __grid_constant__ ExactProducts e) {
  __shared__ __align__(16) float x[kRows][kStride], w[kCols][kStride];
  begin_kernel();
  const ExactProduct& p = e.product[blockIdx.z];
  const uint32_t rows = row_count(*step, e.rows), first_row = blockIdx.y * kRows,
                 first_col = blockIdx.x * kCols;
  if (first_row >= rows || first_col >= p.out_cols) return;
  constexpr uint32_t kEights = kDepth / 8, kAtOnce = kThreads / kEights;
  const uint32_t loaded = threadIdx.x / kEights, part = threadIdx.x % kEights * 8;
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, row = warp / 2 * 4 + lane / 8,
                 col = warp % 2 * 8 + lane % 8;
  float sums[kEach][kEach] = {};
  for (uint32_t first = 0; first < e.in_cols; first += kDepth) {
    const uint32_t c = first + part;
    EightFloats of_x[kRows / kAtOnce], of_w[kCols / kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kRows / kAtOnce; ++i) {
      const uint32_t r = first_row + loaded + i * kAtOnce;
      of_x[i] = c < e.in_cols && r < rows ? eight_of_floats(e.x + uint64_t(r) * e.x_stride, c, e.in_cols)
                                          : EightFloats{};
    }
#pragma unroll
    for (uint32_t i = 0; i < kCols / kAtOnce; ++i) {
      const uint32_t r = first_col + loaded + i * kAtOnce;
      of_w[i] = {};
      if (c >= e.in_cols || r >= p.out_cols) continue;
      const auto eight = eight_of_row<type>(p.w + r * p.row_bytes, c, e.in_cols);
#pragma unroll
      for (uint32_t k = 0; k < 8; ++k) of_w[i].v[k] = eight.at(k);
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < kRows / kAtOnce; ++i) store_eight(&x[loaded + i * kAtOnce][part], of_x[i]);
#pragma unroll
    for (uint32_t i = 0; i < kCols / kAtOnce; ++i) store_eight(&w[loaded + i * kAtOnce][part], of_w[i]);
    __syncthreads();
#pragma unroll 4
    for (uint32_t k = 0; k < kDepth; k += 4) {
      float4 a[kEach], b[kEach];
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        a[i] = *reinterpret_cast<const float4*>(&x[row + i * (kRows / kEach)][k]);
        b[i] = *reinterpret_cast<const float4*>(&w[col + i * (kCols / kEach)][k]);
      }
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i)
#pragma unroll
        for (uint32_t j = 0; j < kEach; ++j) sums[i][j] = product_of(sums[i][j], a[i], b[j]);
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i)
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) {
      const uint32_t r = first_row + row + i * (kRows / kEach), c = first_col + col + j * (kCols / kEach);
      if (r >= rows || c >= p.out_cols) continue;
      float& y = p.y[uint64_t(r) * p.y_stride + c];
      const float sum = sums[i][j] * p.scale + (p.bias ? p.bias[c] : 0);
      y = p.add ? y + sum : sum;
    }
}

}  // namespace

void multiply_exactly(const Launch& l, std::span<const Linear> siblings) {
  // A launch for each run of siblings whose matrices have the same type.
  while (!siblings.empty()) {
    const Linear& first = siblings[0];
    ExactProducts e{.x = data<float>(first.x),
                    .in_cols = first.p.in_cols,
                    .x_stride = first.p.x_stride,
                    .rows = first.p.rows,
                    .product = {}};
    uint32_t count = 0, most_cols = 0;
    for (const Linear& op : siblings) {
      if (op.w.type != first.w.type || count == kMostSiblings) break;
      e.product[count++] = {.w = data<std::byte>(op.w),
                            .bias = data<float>(op.bias),
                            .y = data<float>(op.y),
                            .row_bytes = dtype_bytes(op.w.type, op.w.cols),
                            .out_cols = op.p.out_cols,
                            .y_stride = op.p.y_stride,
                            .add = op.p.add != 0,
                            .scale = op.w.scale};
      most_cols = std::max(most_cols, op.p.out_cols);
    }
    const dim3 blocks(static_cast<uint32_t>(ceil_div(most_cols, kCols)),
                      static_cast<uint32_t>(ceil_div(most_rows(l, first.p.rows), kRows)), count);
    launch(l, of_type(first.w.type, [](auto type) { return exact_rows_kernel<type()>; }), blocks, kThreads, 0,
           l.step, e);
    siblings = siblings.subspan(count);
  }
}

}  // namespace thimble::cuda
