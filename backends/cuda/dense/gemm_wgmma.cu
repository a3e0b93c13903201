// The product of linear, glu and the experts on Hopper: bulk tensor copies feed wgmma through a ring in
// shared memory.
#include <algorithm>

#include "backends/cuda/dense/dense.h"
#include "backends/cuda/dense/groups.cuh"
#include "backends/cuda/host/tensor_map.h"
#include "backends/cuda/wgmma.cuh"

namespace thimble::cuda {
namespace {

// A block computes tiles of 128 x kCols, one after the other. One thread copies the next 64 columns of the
// operands into a ring of stages; two warpgroups multiply them, 64 rows each. While one warpgroup writes its
// rows of a tile, the other uses the matrix units for as long as the ring is filled, and the operands of the
// next tile arrive.
//
// A multiprocessor at full rate does 4096 FLOP per clock. It then reads 48 bytes per clock from the
// second-level cache with 256 columns, and 64 bytes with 128.
constexpr uint32_t kTileRows = 128;
constexpr uint32_t kTileDepth = 64;  // 128 bytes: the width of a swizzle
constexpr uint32_t kConsumers = 2;   // warpgroups
constexpr uint32_t kThreads = (1 + kConsumers) * kWarpgroup;

// The ring of stages in shared memory: a tile of x, a tile of w.
template <uint32_t kCols>
struct Ring {
  static constexpr uint32_t kXBytes = kTileRows * kTileDepth * sizeof(__half);
  static constexpr uint32_t kStageBytes = kXBytes + kCols * kTileDepth * sizeof(__half);
  static constexpr uint32_t kStages = (192 << 10) / kStageBytes;
  // Includes two barriers per stage, and padding to align the start to the 1024 bytes of a swizzle.
  static constexpr uint32_t kSharedBytes = 1024 + kStages * (kStageBytes + 2 * sizeof(uint64_t));
};

// The part of a Product that the kernel reads.
struct Task {
  uint32_t k, cols, first_row, rows;
  const float* x_scales;
  float* y;
  uint32_t y_stride, y_cols;
  bool add, glu;
  uint32_t act;
  bool wide;  // writes four elements of y at a time
  const uint32_t* groups_first;
  uint32_t groups;
  float w_scale[2];
  const float* bias[2];
  uint32_t bias_stride;
  const float* group_scales[2];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Row tiles that all blocks together process at a time. 132 tiles of 128 x 256 are then about as high as
// wide, which reads the least, and all blocks read the same part of W at about the same time.
constexpr uint32_t kGroup = 16;

// 384 threads start with 168 of the 65536 registers each; the warpgroup that only copies releases most of its
// own.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// A thread's position in the ring, and the parity of the phase of its stage.
template <uint32_t kStages>
struct Place {
  uint32_t stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

struct Tile {
  uint32_t row, end;  // the first row, and one past the last row, of the tile or of several tiles
  uint32_t col;       // the first row of w, within its group
  uint32_t group;
};
// Tile i of a product; tiles are ordered down the rows of kGroup tiles first.
__device__ inline Tile tile_at(uint32_t i, uint32_t rows, uint32_t row_tiles, uint32_t col_tiles,
                               uint32_t cols) {
  const uint32_t first = i / (kGroup * col_tiles) * kGroup, rest = i % (kGroup * col_tiles);
  const uint32_t height = min(row_tiles - first, kGroup);
  return {(first + rest % height) * kTileRows, rows, rest / height * cols, 0};
}
// Tile i of a product in groups; tiles are ordered along the columns first.
__device__ inline Tile tile_of_group(const Task& t, const uint32_t* starts, uint32_t i, uint32_t col_tiles,
                                     uint32_t cols) {
  const uint32_t row_tile = i / col_tiles, group = group_of_tile(starts, t.groups, row_tile);
  return {t.groups_first[group] + (row_tile - starts[group]) * kTileRows, t.groups_first[group + 1],
          i % col_tiles * cols, group};
}

// Exchanges a lane's parts of an output row in two neighbouring blocks of 8 columns, a and b, for four
// adjacent columns: lane l % 4 gets columns 4 (l % 4 / 2) to + 3 of block l % 2.
__device__ inline float4 exchange(float2 a, float2 b) {
  const bool odd = threadIdx.x & 1;
  const float2 give = odd ? a : b;
  const float2 got = {__shfl_xor_sync(~0u, give.x, 1), __shfl_xor_sync(~0u, give.y, 1)};
  return odd ? float4{got.x, got.y, b.x, b.y} : float4{a.x, a.y, got.x, got.y};
}

// Loads four floats at y; zeros from element `there` on. `wide`: y is aligned, and all or none of them exist.
__device__ inline float4 load_four(const float* y, int32_t there, bool wide) {
  if (wide) return there > 0 ? *reinterpret_cast<const float4*>(y) : float4{};
  return {there > 0 ? y[0] : 0, there > 1 ? y[1] : 0, there > 2 ? y[2] : 0, there > 3 ? y[3] : 0};
}
__device__ inline void store_four(float* y, float4 v, int32_t there, bool wide) {
  if (wide) {
    if (there > 0) *reinterpret_cast<float4*>(y) = v;
    return;
  }
  if (there > 0) y[0] = v.x;
  if (there > 1) y[1] = v.y;
  if (there > 2) y[2] = v.z;
  if (there > 3) y[3] = v.w;
}

// A lane's pair in a block of 8 columns from column `first` of y on, with the bias added.
template <bool kGrouped>
__device__ inline float2 with_bias(const Task& t, uint32_t which, const Tile& tile, uint32_t first,
                                   float2 pair) {
  if (!kGrouped || !t.bias[which]) return pair;
  const uint32_t col = first + threadIdx.x % 4 * 2;
  const float* bias = t.bias[which] + uint64_t(tile.group) * t.bias_stride + col;
  return {pair.x + (col < t.y_cols ? bias[0] : 0), pair.y + (col + 1 < t.y_cols ? bias[1] : 0)};
}

// The scale of w, or of the tile's group of it.
template <bool kGrouped>
__device__ inline float w_scale(const Task& t, uint32_t which, const Tile& tile) {
  return kGrouped && t.group_scales[which] ? t.group_scales[which][tile.group] : t.w_scale[which];
}

// Writes one row of kBlocks blocks of 8 columns, from column `first` of y on; block(i) is this lane's part of
// block i.
template <uint32_t kBlocks, typename Block>
__device__ inline void write_row(const Task& t, uint32_t row, uint32_t rows, uint32_t first,
                                 const Block& block) {
  const uint32_t lane = threadIdx.x % kWarp, column = first + 8 * (lane % 2) + 4 * (lane % 4 / 2);
  const int32_t there = row < rows ? static_cast<int32_t>(t.y_cols - column) : 0;
  float* y = t.y + uint64_t(row) * t.y_stride + column;
  float4 before[kBlocks / 2] = {};
  if (t.add) {  // the whole row is loaded before its first element is needed
#pragma unroll
    for (int32_t i = 0; i < kBlocks / 2; ++i) before[i] = load_four(y + 16 * i, there - 16 * i, t.wide);
  }
#pragma unroll
  for (int32_t i = 0; i < kBlocks / 2; ++i) {
    const float4 v = exchange(block(2 * i), block(2 * i + 1)), b = before[i];
    store_four(y + 16 * i, {v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w}, there - 16 * i, t.wide);
  }
}

#endif

template <uint32_t kCols, bool kGrouped>
__global__ __launch_bounds__(kThreads, 1) void wgmma_kernel(const StepParams* step, Task t,
                                                            const __grid_constant__ CUtensorMap x_map,
                                                            const __grid_constant__ CUtensorMap w_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using R = Ring<kCols>;
  extern __shared__ std::byte shared[];
  std::byte* ring = shared + (1024 - shared_address(shared) % 1024) % 1024;
  const auto x_tile = [&](uint32_t stage) { return ring + stage * R::kStageBytes; };
  const auto w_tile = [&](uint32_t stage) { return x_tile(stage) + R::kXBytes; };
  uint64_t* full = reinterpret_cast<uint64_t*>(ring + R::kStages * R::kStageBytes);
  uint64_t* empty = full + R::kStages;
  uint32_t* starts = reinterpret_cast<uint32_t*>(empty + R::kStages);  // first tiles of the groups

  release_successor();
  if (threadIdx.x == 0) {
    prefetch(x_map);
    prefetch(w_map);
    for (uint32_t s = 0; s < R::kStages; ++s) {
      init_barrier(full + s, 1);
      init_barrier(empty + s, kConsumers * kWarpgroup / kWarp);
    }
    publish_barriers();
  }
  __syncthreads();
  await_predecessor();

  if constexpr (kGrouped) {
    if (threadIdx.x < kWarp) count_row_tiles<kTileRows>(t.groups_first, t.groups, starts);
    __syncthreads();
  }
  const uint32_t rows = kGrouped ? 0 : product_rows(*step, t.first_row, t.rows);
  const uint32_t row_tiles = kGrouped ? starts[t.groups] : (rows + kTileRows - 1) / kTileRows;
  const uint32_t col_tiles = (t.cols + kCols - 1) / kCols;
  const auto tile_number = [&](uint32_t i) {
    if constexpr (kGrouped)
      return tile_of_group(t, starts, i, col_tiles, kCols);
    else
      return tile_at(i, rows, row_tiles, col_tiles, kCols);
  };
  const uint32_t tiles = row_tiles * col_tiles, depths = t.k / kTileDepth;
  const uint32_t warpgroup = threadIdx.x / kWarpgroup;
  Place<R::kStages> at;
  if (warpgroup == 0) {
    shrink_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      order_before_copies();
      for (uint32_t i = blockIdx.x; i < tiles; i += gridDim.x) {
        const Tile tile = tile_number(i);
        for (uint32_t d = 0; d < depths; ++d, at.advance()) {
          wait(empty + at.stage, at.parity ^ 1);
          arrive_and_expect(full + at.stage, R::kStageBytes);
          copy_box(x_tile(at.stage), x_map, d * kTileDepth, tile.row, full + at.stage);
          copy_box(w_tile(at.stage), w_map, d * kTileDepth, tile.group * t.cols + tile.col, full + at.stage);
        }
      }
    }
  } else {
    grow_registers<kConsumerRegisters>();
    const uint32_t lane = threadIdx.x % kWarp,
                   warp = threadIdx.x / kWarp - kWarpgroup / kWarp;  // warp number among the consumers
    // Each warp releases for itself, because it only knows of its own products
    const auto release = [&](uint32_t stage) {
      if (lane == 0) arrive(empty + stage);
    };
    for (uint32_t i = blockIdx.x; i < tiles; i += gridDim.x) {
      const Tile tile = tile_number(i);
      if (kGrouped && tile.row + (warpgroup - 1) * (kTileRows / kConsumers) >= tile.end) {
        for (uint32_t d = 0; d < depths; ++d, at.advance()) {  // the other warpgroup has all of the rows
          wait(full + at.stage, at.parity);
          release(at.stage);
        }
        continue;
      }
      const uint32_t row = tile.row + warp * 16 + lane / 4;
      const float scales[] = {t.x_scales[row],
                              t.x_scales[row + 8]};  // the array is padded beyond the last row
      float sums[kCols / 8][4];
      uint32_t previous = 0;
      for (uint32_t d = 0; d < depths; ++d, at.advance()) {
        wait(full + at.stage, at.parity);
        const uint64_t x = tile_descriptor(x_tile(at.stage) + (warpgroup - 1) * (R::kXBytes / kConsumers));
        const uint64_t w = tile_descriptor(w_tile(at.stage));
        begin_products();
#pragma unroll
        for (uint32_t step16 = 0; step16 < kTileDepth / 16; ++step16)
          multiply_async_f16(sums, x + step16 * kDescriptorStep, w + step16 * kDescriptorStep, d | step16);
        commit_products();
        wait_products<1>();  // the previous stage was read; this one is in flight
        if (d > 0) release(previous);
        previous = at.stage;
      }
      wait_products<0>();
      pin(sums);
      release(previous);

      const float of_w[2] = {w_scale<kGrouped>(t, 0, tile), w_scale<kGrouped>(t, 1, tile)};
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float gate_scale = scales[half] * of_w[0], up_scale = scales[half] * of_w[1];
        const auto block = [&](uint32_t j, float scale) {
          return float2{scale * sums[j][2 * half], scale * sums[j][2 * half + 1]};
        };
        if (t.glu)
          write_row<kCols / 16>(t, row + 8 * half, tile.end, tile.col / 2, [&](uint32_t j) {
            const float2 gate =
                             with_bias<kGrouped>(t, 0, tile, tile.col / 2 + 8 * j, block(2 * j, gate_scale)),
                         up = with_bias<kGrouped>(t, 1, tile, tile.col / 2 + 8 * j,
                                                  block(2 * j + 1, up_scale));
            return float2{glu_of_product(gate.x, up.x, t.act), glu_of_product(gate.y, up.y, t.act)};
          });
        else
          write_row<kCols / 8>(t, row + 8 * half, tile.end, tile.col, [&](uint32_t j) {
            return with_bias<kGrouped>(t, 0, tile, tile.col + 8 * j, block(j, gate_scale));
          });
      }
    }
  }
#endif
}

// Approximate for a product in groups: every other group ends with a tile that could hold another group's
// rows.
uint64_t tile_count(const Product& p, uint32_t cols) {
  return (ceil_div(p.rows, kTileRows) + p.groups / 2) * ceil_div(p.cols, cols);
}

template <uint32_t kCols>
void multiply_tiles(const Launch& l, const Product& p) {
  CUtensorMap x_map{}, w_map{};
  if (*l.error == cudaSuccess) *l.error = make_tensor_map(x_map, p.x, p.rows, p.k, kTileRows);
  if (*l.error == cudaSuccess)
    *l.error = make_tensor_map(w_map, p.w, uint64_t(p.cols) * std::max(p.groups, 1u), p.k, kCols);
  const bool wide = reinterpret_cast<uintptr_t>(p.y) % 16 == 0 && p.y_stride % 4 == 0 && p.y_cols % 4 == 0;
  const Task task{.k = p.k,
                  .cols = p.cols,
                  .first_row = p.first_row,
                  .rows = p.rows,
                  .x_scales = p.x_scales,
                  .y = p.y,
                  .y_stride = p.y_stride,
                  .y_cols = p.y_cols,
                  .add = p.add,
                  .glu = p.glu,
                  .act = p.act,
                  .wide = wide,
                  .groups_first = p.groups_first,
                  .groups = p.groups,
                  .w_scale = {p.w_scale[0], p.w_scale[1]},
                  .bias = {p.bias[0], p.bias[1]},
                  .bias_stride = p.bias_stride,
                  .group_scales = {p.group_scales[0], p.group_scales[1]}};
  const uint32_t blocks =
      static_cast<uint32_t>(std::min<uint64_t>(tile_count(p, kCols), l.card.multiprocessors));
  if (p.groups)
    launch(l, wgmma_kernel<kCols, true>, l.card.multiprocessors, kThreads,
           Ring<kCols>::kSharedBytes + (p.groups + 1) * sizeof(uint32_t), l.step, task, x_map, w_map);
  else
    launch(l, wgmma_kernel<kCols, false>, blocks, kThreads, Ring<kCols>::kSharedBytes, l.step, task, x_map,
           w_map);
}

}  // namespace

bool wgmma_can(const Launch& l, const Product& p) {
  return l.card.major == 9 && l.card.minor == 0 &&
         l.card.shared_bytes >= Ring<256>::kSharedBytes + (p.groups + 1) * sizeof(uint32_t) && p.rows >= 64 &&
         p.k > 0 && p.k % kTileDepth == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(p.w) % 16 == 0 && encode_tiled();
}

void multiply_wgmma(const Launch& l, const Product& p) {
  // Cost of a wave in columns of a tile. Narrow tiles read a third more per product.
  const auto waves = [&](uint32_t cols) { return ceil_div(tile_count(p, cols), l.card.multiprocessors); };
  if (4 * 256 * waves(256) <= 5 * 128 * waves(128))
    multiply_tiles<256>(l, p);
  else
    multiply_tiles<128>(l, p);
}

}  // namespace thimble::cuda
