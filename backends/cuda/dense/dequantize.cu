// Makes the operands of a tensor core product as f16: rows of x, scaled, and rows of W of any type.
//
// A thread makes 8 neighbouring elements, which are 16 bytes to store.
#include "backends/cuda/dense/dense.h"
#include "backends/cuda/dense/formats.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kRowsAtOnce = 4;  // rows of W per thread, so that enough loads are in flight

struct Rows {
  const std::byte* w;
  uint64_t row_bytes;
  uint32_t in_cols, rows;
  __half* to;
  uint32_t k;
  bool in_groups;
  uint32_t col_blocks;  // adjacent blocks per row
  // For experts, whose blocks follow each other along y of the grid; null: one matrix.
  const uint32_t* experts_first;
  uint64_t expert_bytes;
  uint32_t expert_rows;  // rows of `to` per expert
};

template <DType type>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(Rows r) {
  release_successor();
  const uint32_t e = 8 * (blockIdx.x % r.col_blocks * kThreads + threadIdx.x);
  const uint32_t first = blockIdx.x / r.col_blocks * kRowsAtOnce;
  const bool there = e < r.in_cols;
  if (r.experts_first) {
    const uint32_t expert = blockIdx.y;
    await_predecessor();  // which may be the routing
    if (r.experts_first[expert] == r.experts_first[expert + 1]) return;
    r.w += expert * r.expert_bytes;
    r.to += uint64_t(expert) * r.expert_rows * r.k;
  }
  uint4 v[kRowsAtOnce];
#pragma unroll
  for (uint32_t i = 0; i < kRowsAtOnce; ++i) {  // without a branch, so that the loads of all rows overlap
    const uint32_t row = min(first + i, r.rows - 1);
    v[i] = as_f16(eight_of_row<type>(r.w + row * r.row_bytes, there ? e : 0, r.in_cols));
  }
  await_predecessor();
#pragma unroll
  for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
    const uint32_t row = first + i, to = r.in_groups ? row / 8 * 16 + row % 8 : row;
    if (row < r.rows && e < r.k)
      *reinterpret_cast<uint4*>(r.to + uint64_t(to) * r.k + e) = there ? v[i] : uint4{};
  }
}

constexpr uint32_t kMostThreads = 1024;  // per row of x
constexpr uint32_t kHeld = 4;            // groups of 8 elements that a thread keeps in registers

// Elements [e, e + 8) of a row of x; zeros from n on. `wide`: the row is 16-byte aligned and n is a multiple
// of 8.
template <bool wide>
__device__ inline void load_eight(float (&v)[8], const float* row, uint32_t e, uint32_t n) {
  if constexpr (wide) {
    const float4* from = reinterpret_cast<const float4*>(row + e);
    const float4 a = e < n ? from[0] : float4{}, b = e < n ? from[1] : float4{};
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v[i] = e + i < n ? row[e + i] : 0;
  }
}
__device__ inline void store_eight(__half* to, const float (&v)[8], float scale) {
  __half2 pairs[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(scale * v[2 * i], scale * v[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(pairs);
}

// A block converts one row, with enough threads to keep the row in registers between finding its largest
// magnitude and scaling it. Elements beyond 32768 are read twice.
template <bool wide>
__global__ void __launch_bounds__(kMostThreads)
    scale_rows_kernel(const StepParams* step, const float* x, uint32_t x_stride, uint32_t in_cols,
                      uint32_t first_row, uint32_t rows, Slots slots, __half* to, uint32_t k, float* scales) {
  __shared__ uint32_t of_warps[kMostThreads / kWarp];
  begin_kernel();
  const uint32_t row = blockIdx.x;
  if (row >= product_rows(*step, first_row, rows, slots.of_a_row)) return;
  x += uint64_t(slots.row ? slots.row[row] : first_row + row) * x_stride;
  to += uint64_t(row) * k;

  const uint32_t first = 8 * threadIdx.x, step_elements = 8 * blockDim.x,
                 behind = first + kHeld * step_elements;
  float held[kHeld][8];
#pragma unroll
  for (uint32_t i = 0; i < kHeld; ++i) load_eight<wide>(held[i], x, first + i * step_elements, in_cols);
  uint32_t largest = 0;  // as bits: infinities and NaN order above all numbers
  const auto count = [&](const float(&v)[8]) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffff);
  };
#pragma unroll
  for (uint32_t i = 0; i < kHeld; ++i) count(held[i]);
  for (uint32_t e = behind; e < k; e += step_elements) {
    float more[8];
    load_eight<wide>(more, x, e, in_cols);
    count(more);
  }
  largest = __reduce_max_sync(~0u, largest);
  const uint32_t lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  if (lane == 0) of_warps[threadIdx.x / kWarp] = largest;
  __syncthreads();
  largest = __reduce_max_sync(~0u, lane < warps ? of_warps[lane] : 0);

  // A power of two has its exponent + 127 in bits 23-30, and the target exponent is 14. A row below 2^-112,
  // or of zeros, is scaled like a row of 2^-112, so that both scales are normal numbers.
  const uint32_t exponent = max(largest >> 23, 15);
  const float scale = __uint_as_float((2 * 127 + 14 - exponent) << 23);
  if (threadIdx.x == 0) scales[row] = __uint_as_float((exponent - 14) << 23);
#pragma unroll
  for (uint32_t i = 0; i < kHeld; ++i)
    if (const uint32_t e = first + i * step_elements; e < k) store_eight(to + e, held[i], scale);
  for (uint32_t e = behind; e < k; e += step_elements) {
    float more[8];
    load_eight<wide>(more, x, e, in_cols);
    store_eight(to + e, more, scale);
  }
}

}  // namespace

void scale_rows(const Launch& l, const Operands& o, const float* x, uint32_t x_stride, uint32_t in_cols,
                uint32_t first_row, uint32_t rows, const Slots& slots) {
  const bool wide = reinterpret_cast<uintptr_t>(x) % 16 == 0 && x_stride % 4 == 0 && in_cols % 8 == 0;
  const uint64_t threads = round_up(ceil_div(o.k, 8 * kHeld), kWarp);
  launch(l, wide ? scale_rows_kernel<true> : scale_rows_kernel<false>, rows,
         static_cast<uint32_t>(std::min<uint64_t>(threads, kMostThreads)), 0, l.step, x, x_stride, in_cols,
         first_row, rows, slots, o.x(l), o.k, o.x_scales(l));
}

void dequantize(const Launch& l, const Weight& w, uint32_t first, uint32_t rows, __half* to, uint32_t k,
                bool in_groups) {
  const uint64_t row_bytes = dtype_bytes(w.type, w.cols);
  const uint32_t col_blocks = static_cast<uint32_t>(ceil_div(k / 8, kThreads));
  const uint32_t blocks = col_blocks * static_cast<uint32_t>(ceil_div(rows, kRowsAtOnce));
  const Rows r{.w = data<std::byte>(w) + first * row_bytes,
               .row_bytes = row_bytes,
               .in_cols = w.cols,
               .rows = rows,
               .to = to,
               .k = k,
               .in_groups = in_groups,
               .col_blocks = col_blocks};
  launch(l, of_type(w.type, [](auto type) { return dequantize_kernel<type()>; }), blocks, kThreads, 0, r);
}

void dequantize_experts(const Launch& l, const Weight& w, uint32_t matrix_rows, uint32_t first, uint32_t rows,
                        const Product& p, __half* to, bool in_groups) {
  const uint64_t row_bytes = dtype_bytes(w.type, w.cols);
  const uint32_t col_blocks = static_cast<uint32_t>(ceil_div(p.k / 8, kThreads));
  const Rows r{.w = data<std::byte>(w) + first * row_bytes,
               .row_bytes = row_bytes,
               .in_cols = w.cols,
               .rows = rows,
               .to = to,
               .k = p.k,
               .in_groups = in_groups,
               .col_blocks = col_blocks,
               .experts_first = p.groups_first,
               .expert_bytes = matrix_rows * row_bytes,
               .expert_rows = p.cols};
  launch(l, of_type(w.type, [](auto type) { return dequantize_kernel<type()>; }),
         dim3(col_blocks * static_cast<uint32_t>(ceil_div(rows, kRowsAtOnce)), p.groups), kThreads, 0, r);
}

}  // namespace thimble::cuda
