// rms_norm: divides each vector by its root mean square and multiplies it by a weight. It may first subtract
// the vector's mean.
#include <algorithm>

#include "backends/cuda/dense/row_sum.cuh"
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kMostThreads = 1024;
constexpr uint32_t kHeld =
    2;  // Vecs of a vector that a thread reads once and keeps; it reads further ones twice

__device__ float squares(float x) { return x * x; }
__device__ float squares(float4 x) { return x.x * x.x + x.y * x.y + (x.z * x.z + x.w * x.w); }
__device__ float scaled(float x, float scale, float weight) { return x * scale * weight; }
__device__ float4 scaled(float4 x, float scale, float4 weight) {
  return {x.x * scale * weight.x, x.y * scale * weight.y, x.z * scale * weight.z, x.w * scale * weight.w};
}

// The weights of these columns. A norm without weights has 1 everywhere.
__device__ float weight_at(const float* weight, uint32_t c) { return weight ? weight[c] : 1; }
__device__ float4 weight_at(const float4* weight, uint32_t c) {
  return weight ? weight[c] : float4{1, 1, 1, 1};
}

__device__ float total(float x) { return x; }
__device__ float total(float4 x) { return (x.x + x.y) + (x.z + x.w); }
__device__ float less(float x, float mean) { return x - mean; }
__device__ float4 less(float4 x, float mean) { return {x.x - mean, x.y - mean, x.z - mean, x.w - mean}; }

__device__ float sum_of(float a, float b) { return a + b; }
__device__ float4 sum_of(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Vecs (float, float4) of a vector, and between rows and vectors.
struct Strides {
  uint32_t cols, x_row, x_group, y_row;
};

// A row of threads processes a vector.
template <typename Vec>
__global__ void __launch_bounds__(kMostThreads)
    rms_norm_kernel(const StepParams* step, RmsNormParams p, const Vec* x, const Vec* __restrict__ weight,
                    Vec* y, Strides strides) {
  const uint32_t cols = strides.cols;
  release_successor();
  Vec held_weight[kHeld], held[kHeld];
#pragma unroll
  for (uint32_t j = 0; j < kHeld; ++j)
    if (const uint32_t c = threadIdx.x + j * blockDim.x; c < cols) held_weight[j] = weight_at(weight, c);
  await_predecessor();
  const uint32_t vector = blockIdx.x * blockDim.y + threadIdx.y, row = vector / p.groups;
  if (row >= row_count(*step, p.rows)) return;
  x += uint64_t(row) * strides.x_row + uint64_t(vector % p.groups) * strides.x_group;
  y += uint64_t(row) * strides.y_row + uint64_t(vector % p.groups) * cols;
#pragma unroll
  for (uint32_t j = 0; j < kHeld; ++j)
    if (const uint32_t c = threadIdx.x + j * blockDim.x; c < cols) held[j] = x[c];
  float mean = 0;
  if (p.center) {
    float all = 0;
#pragma unroll
    for (uint32_t j = 0; j < kHeld; ++j)
      if (threadIdx.x + j * blockDim.x < cols) all += total(held[j]);
    for (uint32_t c = threadIdx.x + kHeld * blockDim.x; c < cols; c += blockDim.x) all += total(x[c]);
    mean = row_sum(all) / static_cast<float>(p.cols);
    if (blockDim.x != kWarp) __syncthreads();  // the next sum is shared in the same memory
#pragma unroll
    for (uint32_t j = 0; j < kHeld; ++j) held[j] = less(held[j], mean);
  }
  float sum = 0;
#pragma unroll
  for (uint32_t j = 0; j < kHeld; ++j)
    if (threadIdx.x + j * blockDim.x < cols) sum += squares(held[j]);
  for (uint32_t c = threadIdx.x + kHeld * blockDim.x; c < cols; c += blockDim.x)
    sum += squares(less(x[c], mean));
  const float scale = rms_scale(row_sum(sum), p.cols, p.eps);
#pragma unroll
  for (uint32_t j = 0; j < kHeld; ++j)
    if (const uint32_t c = threadIdx.x + j * blockDim.x; c < cols) {
      const Vec normed = scaled(held[j], scale, held_weight[j]);
      y[c] = p.add ? sum_of(y[c], normed) : normed;
    }
  for (uint32_t c = threadIdx.x + kHeld * blockDim.x; c < cols; c += blockDim.x) {
    const Vec normed = scaled(less(x[c], mean), scale, weight_at(weight, c));
    y[c] = p.add ? sum_of(y[c], normed) : normed;
  }
}

template <typename Vec>
void launch_with(const Launch& l, const RmsNorm& op) {
  constexpr uint32_t kFloats = sizeof(Vec) / sizeof(float);
  const uint32_t cols = op.p.cols / kFloats, vectors = most_rows(l, op.p.rows) * op.p.groups;
  const uint32_t width =
      std::min<uint32_t>(static_cast<uint32_t>(round_up(ceil_div(cols, kHeld), kWarp)), kMostThreads);
  const uint32_t height = width == kWarp ? 8 : 1;  // short vectors, such as those of heads, share a block
  launch(l, rms_norm_kernel<Vec>, static_cast<uint32_t>(ceil_div(vectors, height)), dim3(width, height), 0,
         l.step, op.p, data<Vec>(op.x), data<Vec>(op.weight), data<Vec>(op.y),
         Strides{.cols = cols,
                 .x_row = (op.p.x_row_stride ? op.p.x_row_stride : op.p.row_stride) / kFloats,
                 .x_group = (op.p.x_group_stride ? op.p.x_group_stride : op.p.cols) / kFloats,
                 .y_row = op.p.row_stride / kFloats});
}

}  // namespace

void rms_norm(const Launch& l, const RmsNorm& op) {
  const RmsNormParams& p = op.p;
  uint64_t alignment = (p.cols | p.row_stride | p.x_row_stride | p.x_group_stride) * sizeof(float);
  for (const float* address : {data<float>(op.x), data<float>(op.weight), data<float>(op.y)})
    alignment |= reinterpret_cast<uint64_t>(address);
  if (alignment % sizeof(float4))
    launch_with<float>(l, op);
  else
    launch_with<float4>(l, op);
}

}  // namespace thimble::cuda
