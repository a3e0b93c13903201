// head_linear: a matrix product in each head. A few rows are multiplied one by one, each weight as it is
// read. More rows, and matrices whose rows are those of inputs, are multiplied on tensor cores, which round
// both factors to the 11 bits of tf32.
#include "backends/cuda/dense/formats.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kMostVectors = 8;  // rows of a program that are multiplied one by one

struct Heads {
  HeadLinearParams p;
  const std::byte* w;
  float scale;
  const float* x;
  float* y;
  bool aligned;  // x and its heads, to 16 bytes

  // A row of a head's matrix.
  template <DType type>
  __device__ const std::byte* matrix_row(uint32_t head, uint32_t row) const {
    const uint64_t cols = p.transposed ? p.out_cols : p.in_cols;
    const uint64_t row_bytes = cols / BlockOf<type>::kBlock * BlockOf<type>::kBytes;
    return w + (p.w_first + uint64_t(head) * p.w_head_rows + row) * row_bytes;
  }
  __device__ const float* input(uint32_t row, uint32_t head) const {
    return x + uint64_t(row) * p.x_stride + uint64_t(head) * p.x_head_stride;
  }
  __device__ float* output(uint32_t row, uint32_t head) const {
    return y + uint64_t(row) * p.y_stride + uint64_t(head) * p.y_head_stride;
  }
  // Threads `thread`, thread + threads, ... copy the channels of a row's head that are copied.
  __device__ void copy(uint32_t row, uint32_t head, uint32_t thread, uint32_t threads) const {
    for (uint32_t i = thread; i < p.copied; i += threads)
      output(row, head)[i] = input(row, head)[p.in_cols + i];
  }
};

// Eight lanes compute an output. The first weights are loaded before the wait.
constexpr uint32_t kLanes = 8, kThreads = 128, kAhead = 4;

// Grid: (outputs, row, head).
template <DType type>
__global__ void __launch_bounds__(kThreads) multiply_vectors_kernel(const StepParams* step, Heads o) {
  release_successor();
  const uint32_t n_rows = step->n_rows, head = blockIdx.z, row = blockIdx.y, lane = threadIdx.x % kLanes,
                 output = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes, in_cols = o.p.in_cols;
  const bool there = output < o.p.out_cols;
  const std::byte* const w = o.matrix_row<type>(head, there ? output : 0);
  decltype(eight_of_row<type>(w, 0, 0)) ahead[kAhead];
  const auto column = [&](uint32_t i) { return 8 * (lane + i * kLanes); };
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i)
    if (column(i) < in_cols) ahead[i] = eight_of_row<type>(w, column(i), in_cols);
  await_predecessor();
  if (row >= n_rows) return;
  const float* const x = o.input(row, head);
  float sum = 0;
  const auto add = [&](const auto& weights, uint32_t c) {
    float v[8];
    if (o.aligned && c + 8 <= in_cols) {
      reinterpret_cast<float4*>(v)[0] = reinterpret_cast<const float4*>(x + c)[0];
      reinterpret_cast<float4*>(v)[1] = reinterpret_cast<const float4*>(x + c)[1];
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) v[i] = c + i < in_cols ? x[c + i] : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      if (c + i < in_cols) sum = fmaf(weights.at(i), v[i], sum);
  };
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i)
    if (column(i) < in_cols) add(ahead[i], column(i));
  for (uint32_t i = kAhead; column(i) < in_cols; ++i)
    add(eight_of_row<type>(w, column(i), in_cols), column(i));
#pragma unroll
  for (uint32_t apart = kLanes / 2; apart; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  if (lane == 0 && there) o.output(row, head)[o.p.copied + output] = o.scale * sum;
  if (blockIdx.x == 0) o.copy(row, head, threadIdx.x, kThreads);
}

// A block has a tile of rows and outputs of a head. Slices of kDepth inputs pass through shared memory, and
// the next ones are loaded meanwhile. Warps have 32 rows and 32 outputs each.
constexpr uint32_t kTileRows = 128, kTileOutputs = 64, kDepth = 32, kTileThreads = 256;
constexpr uint32_t kStride = kDepth + 4;  // between rows: eight rows are in different banks
constexpr uint32_t kRowsAtOnce = kTileThreads / kDepth;

// Grid: (outputs, rows, head).
template <DType type>
__global__ void __launch_bounds__(kTileThreads, 2) multiply_rows_kernel(const StepParams* step, Heads o) {
  alignas(16) __shared__ uint32_t x_slice[kTileRows * kStride];     // [row][input]
  alignas(16) __shared__ uint32_t w_slice[kTileOutputs * kStride];  // [output][input]
  const StepParams s = begin_kernel(step);
  const uint32_t head = blockIdx.z, first_row = blockIdx.y * kTileRows,
                 first_output = blockIdx.x * kTileOutputs;
  if (first_row >= s.n_rows) return;
  const HeadLinearParams& p = o.p;
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // A thread has an input of every kRowsAtOnce-th row, and eight neighbours in a row of the matrix.
  const uint32_t w_output = p.transposed ? warp * 8 : threadIdx.x / 4,
                 w_input = p.transposed ? lane : threadIdx.x % 4 * 8;
  float of_x[kTileRows / kRowsAtOnce], of_w[8];
  const auto load = [&](uint32_t first_input) {
    const uint32_t input = first_input + threadIdx.x % kDepth;
#pragma unroll
    for (uint32_t i = 0; i < kTileRows / kRowsAtOnce; ++i) {
      const uint32_t row = first_row + i * kRowsAtOnce + threadIdx.x / kDepth;
      of_x[i] = row < s.n_rows && input < p.in_cols ? o.input(row, head)[input] : 0;
    }
    const uint32_t output = first_output + w_output, own_input = first_input + w_input;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) of_w[i] = 0;
    if (output >= p.out_cols || own_input >= p.in_cols) return;
    const auto weights =
        eight_of_row<type>(o.matrix_row<type>(head, p.transposed ? own_input : output),
                           p.transposed ? output : own_input, p.transposed ? p.out_cols : p.in_cols);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) of_w[i] = weights.at(i);
  };
  const auto store = [&] {
#pragma unroll
    for (uint32_t i = 0; i < kTileRows / kRowsAtOnce; ++i)
      round_tf32(x_slice[(i * kRowsAtOnce + threadIdx.x / kDepth) * kStride + threadIdx.x % kDepth], of_x[i]);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      round_tf32(
          w_slice[p.transposed ? (w_output + i) * kStride + w_input : w_output * kStride + w_input + i],
          of_w[i]);
  };

  const uint32_t own_row = warp % 4 * 32, own_output = warp / 4 * 32;
  const uint32_t* const x_lane = x_slice + (own_row + lane / 4) * kStride + lane % 4;
  const uint32_t* const w_lane = w_slice + (own_output + lane / 4) * kStride + lane % 4;
  float sums[2][4][4] = {};
  load(0);
  for (uint32_t first_input = 0; first_input < p.in_cols; first_input += kDepth) {
    store();
    __syncthreads();
    if (first_input + kDepth < p.in_cols) load(first_input + kDepth);
#pragma unroll
    for (uint32_t k = 0; k < kDepth; k += 8) {
      uint32_t a[2][4];
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r)
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) a[r][i] = x_lane[(16 * r + i % 2 * 8) * kStride + k + i / 2 * 4];
#pragma unroll
      for (uint32_t n = 0; n < 4; ++n) {
        const uint32_t b0 = w_lane[8 * n * kStride + k], b1 = w_lane[8 * n * kStride + k + 4];
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) multiply_tf32(sums[r][n], a[r], b0, b1);
      }
    }
    __syncthreads();  // these slices are no longer needed
  }
#pragma unroll
  for (uint32_t r = 0; r < 2; ++r)
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t row = first_row + own_row + 16 * r + i / 2 * 8 + lane / 4,
                       output = first_output + own_output + 8 * n + 2 * (lane % 4) + i % 2;
        if (row < s.n_rows && output < p.out_cols)
          o.output(row, head)[p.copied + output] = o.scale * sums[r][n][i];
      }
  if (blockIdx.x != 0) return;
  for (uint32_t row = first_row + warp; row < min(first_row + kTileRows, s.n_rows);
       row += kTileThreads / kWarp)
    o.copy(row, head, lane, kWarp);
}

}  // namespace

void head_linear(const Launch& l, const HeadLinear& op) {
  const HeadLinearParams& p = op.p;
  const float* const x = data<float>(op.x);
  const Heads o{
      .p = p,
      .w = data<std::byte>(op.w),
      .scale = op.w.scale,
      .x = x,
      .y = data<float>(op.y),
      .aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0 && p.x_stride % 4 == 0 && p.x_head_stride % 4 == 0};
  const auto blocks = [](uint32_t n, uint32_t of) { return static_cast<uint32_t>(ceil_div(n, of)); };
  if (l.max_rows <= kMostVectors && !p.transposed)
    launch(l, of_type(op.w.type, [](auto type) { return multiply_vectors_kernel<type()>; }),
           dim3(blocks(p.out_cols, kThreads / kLanes), l.max_rows, p.heads), kThreads, 0, l.step, o);
  else
    launch(l, of_type(op.w.type, [](auto type) { return multiply_rows_kernel<type()>; }),
           dim3(blocks(p.out_cols, kTileOutputs), blocks(l.max_rows, kTileRows), p.heads), kTileThreads, 0,
           l.step, o);
}

}  // namespace thimble::cuda
