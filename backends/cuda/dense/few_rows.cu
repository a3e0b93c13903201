// linear and glu of a few rows, more than one. W is read once, as stored, and converted to f16 in registers
// as input of the tensor cores. With scratch, as for many rows, W would be written and read once more.
//
// A block computes 16 columns of y. Its warps divide the columns of W among them, 32 at a time. In a fragment
// of 16 columns a lane has two pairs; which columns they are does not matter as long as x's fragment uses the
// same ones. A lane therefore loads eight neighbours of a row (16 bytes of x), which cover two fragments.
#include "backends/cuda/dense/dense.h"
#include "backends/cuda/dense/few_rows.h"
#include "backends/cuda/dense/formats.cuh"
#include "backends/cuda/mma.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kCols = 16;  // columns of y per block: rows of W
constexpr uint32_t kWarps = 16, kThreads = kWarps * kWarp;
constexpr uint32_t kGroup = 32;  // columns of W per warp at a time
constexpr uint32_t kAhead = 2;   // groups in flight per warp
// Stride of sums in shared memory, chosen so that lanes use different banks
constexpr uint32_t kStride = kCols + 4;

struct FewRows {
  const std::byte* w[2];  // for glu those of gate and up
  uint64_t row_bytes;     // per row of W
  uint32_t in_cols, cols;
  const __half* x;        // [rows][k], zeros from in_cols on
  const float* x_scales;  // [rows]
  uint32_t k, rows;
  const float* bias;  // or null
  float* y;
  uint32_t y_stride, add, act;
  float w_scale[2];  // of w
};

// kTiles: tiles of eight rows of x.
template <DType type, bool kPair, uint32_t kTiles>
__global__ void __launch_bounds__(kThreads, kPair || kTiles > 2 ? 1 : 2)
    few_rows_kernel(const StepParams* step, FewRows p) {
  constexpr uint32_t kMatrices = kPair ? 2 : 1, kHalfWarps = kWarps / 2,
                     kTilesAtOnce = kTiles < 4 ? kTiles : 4;
  extern __shared__ float parts[];  // [kHalfWarps][kMatrices][8 kTiles][kStride]
  release_successor();
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, row = lane / 4,
                 first_col = blockIdx.x * kCols;
  const std::byte* w[kMatrices][2];
#pragma unroll
  for (uint32_t m = 0; m < kMatrices; ++m)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      w[m][half] = p.w[m] + min(first_col + row + 8 * half, p.cols - 1) * p.row_bytes;

  // Weights never change, so the first ones are loaded before the wait for the previous kernels.
  using Elements = decltype(eight_of_row<type>(nullptr, 0, 0));
  Elements ahead[kAhead][kMatrices][2];
  uint32_t column = kGroup * warp + lane % 4 * 8;
  const auto fetch = [&](Elements(&to)[kMatrices][2], uint32_t from) {
#pragma unroll
    for (uint32_t m = 0; m < kMatrices; ++m)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half)
        to[m][half] = eight_of_row<type>(w[m][half], from < p.in_cols ? from : 0, p.in_cols);
  };
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i) fetch(ahead[i], column + i * kGroup * kWarps);
  await_predecessor();
  const uint32_t rows = product_rows(*step, 0, p.rows);
  if (rows == 0) return;

  float sums[kMatrices][kTiles][4] = {};
  const __half* x = p.x + uint64_t(row) * p.k;
  while (column - lane % 4 * 8 < p.in_cols) {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i, column += kGroup * kWarps) {
      if (column - lane % 4 * 8 >= p.in_cols) break;
      uint4 a[kMatrices][2];
#pragma unroll
      for (uint32_t from = 0; from < kTiles; from += kTilesAtOnce) {
        uint4 b[kTilesAtOnce];  // all loaded before the first is needed
#pragma unroll
        for (uint32_t tile = from; tile < from + kTilesAtOnce; ++tile)
          if (8 * tile < rows)
            b[tile - from] = *reinterpret_cast<const uint4*>(x + uint64_t(8 * tile) * p.k + column);
        if (from == 0) {  // columns of W, and those that follow
#pragma unroll
          for (uint32_t m = 0; m < kMatrices; ++m)
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half)
              a[m][half] = column < p.in_cols ? as_f16(ahead[i][m][half]) : uint4{};
          fetch(ahead[i], column + kAhead * kGroup * kWarps);
        }
#pragma unroll
        for (uint32_t tile = from; tile < from + kTilesAtOnce; ++tile) {
          if (8 * tile >= rows) break;
          const uint4 x8 = b[tile - from];
#pragma unroll
          for (uint32_t m = 0; m < kMatrices; ++m) {
            multiply_f16(sums[m][tile], {a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y}, x8.x, x8.y);
            multiply_f16(sums[m][tile], {a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w}, x8.z, x8.w);
          }
        }
      }
    }
  }

  // The warps' sums are added in a fixed order: the second half's to the first half's, then all.
  const auto part = [&](uint32_t of_warp, uint32_t m, uint32_t x_row) {
    return parts + ((of_warp * kMatrices + m) * 8 * kTiles + x_row) * kStride;
  };
  const auto each_sum = [&](const auto& use) {
#pragma unroll
    for (uint32_t m = 0; m < kMatrices; ++m)
#pragma unroll
      for (uint32_t tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
          if (8 * tile < rows)
            use(sums[m][tile][i],
                part(warp % kHalfWarps, m, 8 * tile + 2 * (lane % 4) + i % 2)[row + i / 2 * 8]);
  };
  if (warp >= kHalfWarps) each_sum([](float sum, float& at) { at = sum; });
  __syncthreads();
  if (warp < kHalfWarps) each_sum([](float sum, float& at) { at = sum + at; });
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < rows * kCols; i += kThreads) {
    const uint32_t x_row = i / kCols, col = i % kCols;
    if (first_col + col >= p.cols) continue;
    float all[kMatrices] = {};
#pragma unroll
    for (uint32_t m = 0; m < kMatrices; ++m)
#pragma unroll
      for (uint32_t k = 0; k < kHalfWarps; ++k) all[m] += part(k, m, x_row)[col];
    const float scale = p.x_scales[x_row];
    float& y = p.y[uint64_t(x_row) * p.y_stride + first_col + col];
    if constexpr (kPair) {
      y = glu_of_product(scale * p.w_scale[0] * all[0], scale * p.w_scale[1] * all[1], p.act);
    } else {
      float sum = scale * p.w_scale[0] * all[0];
      if (p.bias) sum += p.bias[first_col + col];
      y = p.add ? y + sum : sum;
    }
  }
}

// Types whose elements are decoded without tables; the other types are rare in files.
template <DType type>
constexpr bool kHasKernel =
    type == DType::kF32 || type == DType::kF16 || type == DType::kBF16 || type == DType::kQ8_0 ||
    type == DType::kQ4_0 || type == DType::kQ4_1 || type == DType::kQ5_0 || type == DType::kQ5_1 ||
    type == DType::kQ2_K || type == DType::kQ3_K || type == DType::kQ4_K || type == DType::kQ5_K ||
    type == DType::kQ6_K || type == DType::kIQ4_NL || type == DType::kIQ4_XS || type == DType::kMXFP4;

using Kernel = void (*)(const StepParams*, FewRows);
template <bool kPair, uint32_t kTiles>
Kernel kernel_for(DType of_w) {
  return of_type(of_w, [](auto type) -> Kernel {
    if constexpr (kHasKernel<type()>)
      return few_rows_kernel<type(), kPair, kTiles>;
    else
      return nullptr;
  });
}

template <bool kPair>
void multiply(const Launch& l, const Operands& o, DType type, FewRows p) {
  p.x = o.x(l);
  p.x_scales = o.x_scales(l);
  p.k = o.k;
  p.rows = l.max_rows;
  p.row_bytes = dtype_bytes(type, p.in_cols);
  const uint32_t tiles = l.max_rows <= 16 ? 2 : l.max_rows <= 32 ? 4 : 8;
  const Kernel kernel = tiles == 2   ? kernel_for<kPair, 2>(type)
                        : tiles == 4 ? kernel_for<kPair, 4>(type)
                                     : kernel_for<kPair, 8>(type);
  launch(l, kernel, static_cast<uint32_t>(ceil_div(p.cols, kCols)), kThreads,
         kWarps / 2 * (kPair ? 2 : 1) * 8 * tiles * kStride * sizeof(float), l.step, p);
}

}  // namespace

bool can_multiply_few(const Launch& l, DType type) {
  return l.max_rows <= kMostFewRows && kernel_for<false, 4>(type) != nullptr;
}

void multiply_few(const Launch& l, const Operands& o, const Linear& op) {
  multiply<false>(l, o, op.w.type,
                  {.w = {data<std::byte>(op.w)},
                   .in_cols = op.p.in_cols,
                   .cols = op.p.out_cols,
                   .bias = data<float>(op.bias),
                   .y = data<float>(op.y),
                   .y_stride = op.p.y_stride,
                   .add = op.p.add,
                   .w_scale = {op.w.scale}});
}

void multiply_few(const Launch& l, const Operands& o, const Glu& op) {
  multiply<true>(l, o, op.gate.type,
                 {.w = {data<std::byte>(op.gate), data<std::byte>(op.up)},
                  .in_cols = op.p.in_cols,
                  .cols = op.p.out_cols,
                  .y = data<float>(op.h),
                  .y_stride = op.p.out_cols,
                  .act = op.p.act,
                  .w_scale = {op.gate.scale, op.up.scale}});
}

}  // namespace thimble::cuda
