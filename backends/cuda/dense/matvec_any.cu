// Products of a matrix of any type and single vectors, without the techniques that make matvec.cu fast: for
// types that it does not support, and for matrices with a scale. A warp computes a row of W, eight columns
// per lane at a time.
#include "backends/cuda/dense/activation.cuh"
#include "backends/cuda/dense/formats.cuh"
#include "backends/cuda/dense/matvec_any.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kRows = 8;  // rows of W per block, one per warp

template <DType type>
__global__ void __launch_bounds__(kRows* kWarp) multiply_any_kernel(const StepParams* step, AnyProduct p) {
  begin_kernel();
  const uint32_t lane = threadIdx.x % kWarp, row = blockIdx.x * kRows + threadIdx.x / kWarp;
  if (row >= p.rows || blockIdx.y >= row_count(*step, p.x_rows)) return;
  const std::byte* w = p.w + row * p.row_bytes;
  const float* x = p.x + uint64_t(blockIdx.y) * p.x_stride;
  float sum = 0;
  for (uint32_t c = 8 * lane; c < p.cols; c += 8 * kWarp) {
    const auto of_w = eight_of_row<type>(w, c, p.cols);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      if (c + i < p.cols) sum = fmaf(of_w.at(i), x[c + i], sum);
  }
  sum = p.scale * warp_sum(sum);
  if (lane) return;
  float& y = p.y[uint64_t(blockIdx.y) * p.y_stride + row];
  if (p.bias) sum += p.bias[row];
  y = p.activates ? activated(y, p.act) * sum : p.add ? y + sum : sum;
}

}  // namespace

void multiply_any(const Launch& l, const Weight& w, AnyProduct p) {
  p.w = data<std::byte>(w);
  p.row_bytes = dtype_bytes(w.type, p.cols);
  p.scale = w.scale;
  launch(l, of_type(w.type, [](auto type) { return multiply_any_kernel<type()>; }),
         dim3(static_cast<uint32_t>(ceil_div(p.rows, kRows)), most_rows(l, p.x_rows)), kRows * kWarp, 0,
         l.step, p);
}

}  // namespace thimble::cuda
