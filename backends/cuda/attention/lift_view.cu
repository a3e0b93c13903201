// lift_view: a matrix product in each head, on tensor cores. The latent channels of the view are f16 already;
// weights are rounded to f16, and so are the keys and values.
#include <algorithm>

#include "backends/cuda/dense/formats.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

// A block has a tile of view rows and outputs of a head. Slices of kDepth latent channels pass through shared
// memory, and the next ones are loaded meanwhile. Warps have 32 rows and 32 outputs each.
constexpr uint32_t kTileRows = 128, kTileOutputs = 64, kDepth = 64, kThreads = 256;
// Between rows in shared memory: an odd number of 16-byte units, so that eight rows are in different banks.
constexpr uint32_t kStride = kDepth + 8;

// The keys or the values.
struct Lifted {
  LiftViewParams p;
  const HeadState* heads;  // of the layer's only run
  const uint32_t* list;
  const __half* view;
  const std::byte* w;
  float scale;
  uint32_t w_first, w_head_rows, outputs;
  bool transposed;
  uint32_t copied;  // channels of the view's rows that follow the outputs
  __half* to;       // [heads][view_capacity][rotated + key_cols]
};

// Grid: (outputs, rows, head).
template <DType type>
__global__ void __launch_bounds__(kThreads, 2) lift_kernel(const StepParams* steps, Lifted o) {
  alignas(16) __shared__ __half x_slices[2][kTileRows * kStride];  // [row][channel]
  alignas(16) __shared__ __half w_slice[kTileOutputs * kStride];   // [output][channel]
  const StepParams step = begin_kernel(steps);
  const LiftViewParams& p = o.p;
  const uint32_t head = blockIdx.z, first_row = blockIdx.y * kTileRows,
                 first_output = blockIdx.x * kTileOutputs, lane = threadIdx.x % kWarp,
                 warp = threadIdx.x / kWarp;
  const uint32_t entries = entry_list(o.list, 0, p.list_capacity, step_entries(step, *o.heads)).count,
                 rows = entries > p.first_entry ? min(entries - p.first_entry, p.view_capacity) : 0;
  if (first_row >= rows) return;
  const uint32_t width = p.rotated + p.latent, key_dim = p.rotated + p.key_cols;

  const auto load_x = [&](uint32_t first, uint32_t slice) {
    for (uint32_t i = threadIdx.x; i < kTileRows * (kDepth / 8); i += kThreads) {
      const uint32_t row = i / (kDepth / 8), channel = i % (kDepth / 8) * 8;
      const bool there = first_row + row < rows && first + channel < p.latent;
      copy_async<16>(
          x_slices[slice] + row * kStride + channel,
          there ? o.view + uint64_t(first_row + row) * width + p.rotated + first + channel : o.view, there);
    }
    commit_copies();
  };
  // A thread has twice eight neighbours in a row of the matrix.
  const uint64_t cols = o.transposed ? o.outputs : p.latent,
                 row_bytes = cols / BlockOf<type>::kBlock * BlockOf<type>::kBytes;
  const std::byte* const w = o.w + (o.w_first + uint64_t(head) * o.w_head_rows) * row_bytes;
  const uint32_t own_row = threadIdx.x / 4, own_column = threadIdx.x % 4 * 16;
  uint4 of_w[2];
  const auto load_w = [&](uint32_t first) {
    const uint32_t row = own_row + (o.transposed ? first : first_output);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t column = own_column + 8 * i + (o.transposed ? first_output : first);
      of_w[i] = {};
      if (row < (o.transposed ? p.latent : o.outputs) && column < cols)
        of_w[i] = as_f16(eight_of_row<type>(w + row * row_bytes, column, static_cast<uint32_t>(cols)));
    }
  };
  const auto store_w = [&] {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t column = own_column + 8 * i;
      if (!o.transposed) {
        *reinterpret_cast<uint4*>(w_slice + own_row * kStride + column) = of_w[i];
        continue;
      }
      const __half* const eight = reinterpret_cast<const __half*>(&of_w[i]);
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j) w_slice[(column + j) * kStride + own_row] = eight[j];
    }
  };

  const uint32_t row_of_warp = warp % 4 * 32, output_of_warp = warp / 4 * 32;
  const uint32_t x_lane = (row_of_warp + lane % 16) * kStride + lane / 16 * 8;
  const __half* const w_lane =
      w_slice + (output_of_warp + lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
  float sums[2][4][4] = {};
  load_x(0, 0);
  load_w(0);
  for (uint32_t first = 0, slice = 0; first < p.latent; first += kDepth, slice ^= 1) {
    store_w();
    wait_copies<0>();
    __syncthreads();
    if (first + kDepth < p.latent) {
      load_x(first + kDepth, slice ^ 1);
      load_w(first + kDepth);
    }
#pragma unroll
    for (uint32_t c = 0; c < kDepth; c += 16) {
      uint32_t a[2][4];
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r) load_matrices(a[r], x_slices[slice] + x_lane + 16 * r * kStride + c);
#pragma unroll
      for (uint32_t n = 0; n < 2; ++n) {
        uint32_t b[4];
        load_matrices(b, w_lane + 16 * n * kStride + c);
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) {
          multiply_f16(sums[r][2 * n], a[r], b[0], b[1]);
          multiply_f16(sums[r][2 * n + 1], a[r], b[2], b[3]);
        }
      }
    }
    __syncthreads();  // all warps have read these slices
  }

  __half* const to = o.to + uint64_t(head) * p.view_capacity * key_dim;
#pragma unroll
  for (uint32_t r = 0; r < 2; ++r)
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = first_row + row_of_warp + 16 * r + 8 * half + lane / 4,
                       output = first_output + output_of_warp + 8 * n + 2 * (lane % 4);
        if (row < rows && output < o.outputs)
          *reinterpret_cast<uint32_t*>(to + uint64_t(row) * key_dim + output) =
              pack(o.scale * sums[r][n][2 * half], o.scale * sums[r][n][2 * half + 1]);
      }
  if (blockIdx.x != 0) return;
  for (uint32_t row = first_row + warp; row < min(first_row + kTileRows, rows); row += kThreads / kWarp)
    for (uint32_t c = lane; c < o.copied; c += kWarp)
      to[uint64_t(row) * key_dim + o.outputs + c] = o.view[uint64_t(row) * width + c];
}

void lift(const Launch& l, const Weight& w, const Lifted& o) {
  const dim3 blocks(static_cast<uint32_t>(ceil_div(o.outputs, kTileOutputs)),
                    static_cast<uint32_t>(ceil_div(o.p.view_capacity, kTileRows)), o.p.heads);
  launch(l, of_type(w.type, [](auto type) { return lift_kernel<type()>; }), blocks, kThreads, 0, l.step, o);
}

}  // namespace

void lift_view(const Launch& l, const LiftView& op) {
  const LiftViewParams& p = op.p;
  Lifted o{.p = p,
           .heads = l.heads + p.head_state,
           .list = data<uint32_t>(op.list),
           .view = data<__half>(op.view),
           .w = data<std::byte>(op.k_up),
           .scale = op.k_up.scale,
           .w_first = p.k_first,
           .w_head_rows = p.k_head_rows,
           .outputs = p.key_cols,
           .transposed = p.k_transposed != 0,
           .copied = p.rotated,
           .to = data<__half>(op.k)};
  lift(l, op.k_up, o);
  o.w = data<std::byte>(op.v_up);
  o.scale = op.v_up.scale;
  o.w_first = p.v_first;
  o.w_head_rows = p.v_head_rows;
  o.outputs = p.value_cols;
  o.transposed = false;
  o.copied = 0;
  o.to = data<__half>(op.v);
  lift(l, op.v_up, o);
}

}  // namespace thimble::cuda
