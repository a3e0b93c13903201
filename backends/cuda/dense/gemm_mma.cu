// The product of linear, glu and the experts on the tensor cores of any card: asynchronous copies feed
// mma.sync through a ring of stages in shared memory.
#include "backends/cuda/dense/dense.h"
#include "backends/cuda/dense/groups.cuh"
#include "backends/cuda/mma.cuh"

namespace thimble::cuda {
namespace {

// A block of 4 warps computes rows x cols of y, a quarter per warp, from `depth` columns of x and w per
// stage.
template <uint32_t rows, uint32_t cols, uint32_t depth, uint32_t stages>
struct Tile {
  static constexpr uint32_t kRows = rows, kCols = cols, kDepth = depth, kStages = stages;
  static constexpr uint32_t kStageElements = (rows + cols) * depth;
  static constexpr uint32_t kSharedBytes = stages * kStageElements * sizeof(__half);
  static_assert(kSharedBytes == 48 << 10);  // two blocks fit the 100 KiB of the smallest multiprocessors
  static_assert(kOperandRows % rows == 0 && kOperandRows % cols == 0 && kOperandDepth % depth == 0);
};
// The registers of a warp hold 64 x 64 elements of y; every element that it loads is used in 64 products.
using LargeTile = Tile<128, 128, 32, 3>;
using MediumTile = Tile<64, 64, 64, 3>;
// For few rows and a large w: enough blocks for every multiprocessor, and many stages
using SmallTile = Tile<32, 32, 64, 6>;

constexpr uint32_t kThreads = 128;

// Where the 16 bytes of `chunk` of a tile's row are stored, as an element offset. 8 lanes that load 8 rows of
// a column of chunks, and 8 lanes that store 8 neighbouring chunks, use 8 different groups of banks.
template <uint32_t depth>
__device__ inline uint32_t swizzled(uint32_t row, uint32_t chunk) {
  static_assert(depth == 32 || depth == 64);
  return row * depth + 8 * (chunk ^ (depth == 64 ? row % 8 : row / 2 % 4));
}

// Writes pairs of neighbouring elements of a row of `cols` elements, one pair every 8 from column `first` on,
// or adds to them. If `wide`, cols is even and the row is aligned to pairs.
template <uint32_t pairs, typename Pair>
__device__ inline void write_pairs(float* row, uint32_t first, uint32_t cols, bool add, bool wide,
                                   const Pair& pair) {
  if (wide) {
    float2 before[pairs];  // all loaded before the first is needed
#pragma unroll
    for (uint32_t j = 0; j < pairs; ++j) {
      const uint32_t col = first + 8 * j;
      before[j] = add && col < cols ? *reinterpret_cast<const float2*>(row + col) : float2{};
    }
#pragma unroll
    for (uint32_t j = 0; j < pairs; ++j) {
      const uint32_t col = first + 8 * j;
      const float2 v = pair(j);
      if (col < cols) *reinterpret_cast<float2*>(row + col) = {before[j].x + v.x, before[j].y + v.y};
    }
  } else {
#pragma unroll
    for (uint32_t j = 0; j < pairs; ++j) {
      const uint32_t col = first + 8 * j;
      const float2 v = pair(j);
      if (col < cols) row[col] = add ? row[col] + v.x : v.x;
      if (col + 1 < cols) row[col + 1] = add ? row[col + 1] + v.y : v.y;
    }
  }
}

template <typename T, bool kGrouped>
__global__ void __launch_bounds__(kThreads, 2) mma_kernel(const StepParams* step, Product p) {
  // Blocks that run at the same time share tiles of w along x of the grid and tiles of x along y.
  constexpr uint32_t kWarpRows = T::kRows / 2, kWarpCols = T::kCols / 2, kRowTiles = kWarpRows / 16,
                     kColTiles = kWarpCols / 8;
  constexpr uint32_t kChunks = T::kDepth / 8, kRowsAtOnce = kThreads / kChunks, kSteps = T::kDepth / 16;
  static_assert(kWarpRows % 16 == 0 && kWarpCols % 16 == 0 && kRowsAtOnce % 8 == 0 && kSteps % 2 == 0);
  begin_kernel();
  extern __shared__ __align__(128) __half ring[];
  uint32_t rows = kGrouped ? 0 : product_rows(*step, p.first_row, p.rows), first_row = blockIdx.x * T::kRows;
  const uint32_t first_col = blockIdx.y * T::kCols;
  if constexpr (kGrouped) {
    uint32_t* const starts = reinterpret_cast<uint32_t*>(ring + T::kStages * T::kStageElements);
    if (threadIdx.x < kWarp) count_row_tiles<T::kRows>(p.groups_first, p.groups, starts);
    __syncthreads();
    if (blockIdx.x >= starts[p.groups]) return;
    const uint32_t group = group_of_tile(starts, p.groups, blockIdx.x);
    first_row = p.groups_first[group] + (blockIdx.x - starts[group]) * T::kRows;
    rows = p.groups_first[group + 1];
    p.w += uint64_t(group) * p.cols * p.k;
    for (const float*& bias : p.bias)
      if (bias) bias += uint64_t(group) * p.bias_stride;
#pragma unroll
    for (uint32_t which = 0; which < 2; ++which)
      if (p.group_scales[which]) p.w_scale[which] = p.group_scales[which][group];
  } else if (first_row >= rows) {
    return;
  }

  // Copies: a thread copies the same chunk of every kRowsAtOnce-th row.
  const uint32_t copy_row = threadIdx.x / kChunks, copy_chunk = threadIdx.x % kChunks;
  const uint32_t copy_to = swizzled<T::kDepth>(copy_row, copy_chunk);
  const __half* x = p.x + uint64_t(first_row + copy_row) * p.k + 8 * copy_chunk;
  const __half* w = p.w + uint64_t(first_col + copy_row) * p.k + 8 * copy_chunk;
  const uint64_t copy_step = uint64_t(kRowsAtOnce) * p.k;
  uint32_t copied = 0, write_stage = 0;
  const uint32_t depths = p.k / T::kDepth;
  const auto copy_stage = [&] {
    if (copied < depths) {
      __half* to = ring + write_stage * T::kStageElements + copy_to;
#pragma unroll
      for (uint32_t i = 0; i < T::kRows / kRowsAtOnce; ++i)
        copy_async<16>(to + i * kRowsAtOnce * T::kDepth, x + i * copy_step);
      to += T::kRows * T::kDepth;
#pragma unroll
      for (uint32_t i = 0; i < T::kCols / kRowsAtOnce; ++i)
        copy_async<16>(to + i * kRowsAtOnce * T::kDepth, w + i * copy_step);
      x += T::kDepth;
      w += T::kDepth;
    }
    commit_copies();  // possibly an empty group, so that the number of groups tells which stage has arrived
    ++copied;
    write_stage = write_stage + 1 == T::kStages ? 0 : write_stage + 1;
  };

  // Fragments of 16 columns of both tiles; those of the next 16 are loaded while these are multiplied.
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t warp_row = warp / 2 * kWarpRows, warp_col = warp % 2 * kWarpCols;
  const uint32_t x_row = warp_row + lane % 16, x_chunk = lane / 16;
  const uint32_t w_row = warp_col + lane % 8 + lane / 16 * 8, w_chunk = lane / 8 % 2;
  uint32_t a[2][kRowTiles][4], b[2][kColTiles / 2][4];
  float sums[kRowTiles][kColTiles][4] = {};
  const auto load_fragments = [&](uint32_t into, uint32_t stage, uint32_t s) {
    const __half* x_tile = ring + stage * T::kStageElements;
    const __half* w_tile = x_tile + T::kRows * T::kDepth;
#pragma unroll
    for (uint32_t i = 0; i < kRowTiles; ++i)
      load_matrices(a[into][i], x_tile + i * 16 * T::kDepth + swizzled<T::kDepth>(x_row, 2 * s + x_chunk));
#pragma unroll
    for (uint32_t j = 0; j < kColTiles / 2; ++j)
      load_matrices(b[into][j], w_tile + j * 16 * T::kDepth + swizzled<T::kDepth>(w_row, 2 * s + w_chunk));
  };

#pragma unroll
  for (uint32_t s = 0; s + 1 < T::kStages; ++s) copy_stage();
  wait_copies<T::kStages - 2>();
  __syncthreads();
  uint32_t read_stage = 0;
  load_fragments(0, 0, 0);
  for (uint32_t d = 0; d < depths; ++d) {
#pragma unroll
    for (uint32_t s = 0; s < kSteps; ++s) {
      // From here on the next stage is visible to all threads, and this one is no longer read
      if (s + 1 == kSteps) {
        wait_copies<T::kStages - 2>();
        __syncthreads();
        read_stage = read_stage + 1 == T::kStages ? 0 : read_stage + 1;
      }
      load_fragments((s + 1) % 2, read_stage, (s + 1) % kSteps);
      if (s == 0) copy_stage();  // into the stage that was read before this one
#pragma unroll
      for (uint32_t i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (uint32_t j = 0; j < kColTiles; ++j)
          multiply_f16(sums[i][j], a[s % 2][i], b[s % 2][j / 2][j % 2 * 2], b[s % 2][j / 2][j % 2 * 2 + 1]);
    }
  }

  const bool wide =
      p.y_stride % 2 == 0 && p.y_cols % 2 == 0 && reinterpret_cast<uintptr_t>(p.y) % sizeof(float2) == 0;
  const uint32_t first = first_col + warp_col;  // row of w
  const auto bias = [&](uint32_t which, uint32_t col) {
    return kGrouped && p.bias[which] && col < p.y_cols ? p.bias[which][col] : 0;
  };
#pragma unroll
  for (uint32_t i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = first_row + warp_row + 16 * i + 8 * half + lane / 4;
      if (row >= rows) continue;
      float* y = p.y + uint64_t(row) * p.y_stride;
      const float scales[2] = {p.x_scales[row] * p.w_scale[0], p.x_scales[row] * p.w_scale[1]};
      const auto pair = [&](uint32_t j, uint32_t which) {
        return float2{scales[which] * sums[i][j][2 * half], scales[which] * sums[i][j][2 * half + 1]};
      };
      if (p.glu)
        write_pairs<kColTiles / 2>(y, first / 2 + 2 * (lane % 4), p.y_cols, p.add, wide, [&](uint32_t j) {
          const float2 gate = pair(2 * j, 0), up = pair(2 * j + 1, 1);
          const uint32_t col = first / 2 + 2 * (lane % 4) + 8 * j;
          return float2{glu_of_product(gate.x + bias(0, col), up.x + bias(1, col), p.act),
                        glu_of_product(gate.y + bias(0, col + 1), up.y + bias(1, col + 1), p.act)};
        });
      else
        write_pairs<kColTiles>(y, first + 2 * (lane % 4), p.y_cols, p.add, wide, [&](uint32_t j) {
          const uint32_t col = first + 2 * (lane % 4) + 8 * j;
          const float2 sum = pair(j, 0);
          return float2{sum.x + bias(0, col), sum.y + bias(0, col + 1)};
        });
    }
}

// Grid for a product in groups: the most tiles that it may need, since each group may end with a partly
// filled tile.
template <typename T>
dim3 blocks_of(const Product& p) {
  return {static_cast<uint32_t>(ceil_div(p.rows, T::kRows)) + p.groups,
          static_cast<uint32_t>(ceil_div(p.cols, T::kCols))};
}
template <typename T>
void multiply_tiles(const Launch& l, const Product& p) {
  if (p.groups)
    launch(l, mma_kernel<T, true>, blocks_of<T>(p), kThreads,
           T::kSharedBytes + (p.groups + 1) * sizeof(uint32_t), l.step, p);
  else
    launch(l, mma_kernel<T, false>, blocks_of<T>(p), kThreads, T::kSharedBytes, l.step, p);
}

}  // namespace

void multiply_mma(const Launch& l, const Product& p) {
  const dim3 large = blocks_of<LargeTile>(p);
  if (p.rows <= SmallTile::kRows)
    multiply_tiles<SmallTile>(l, p);
  else if (large.x * large.y < l.card.multiprocessors)
    multiply_tiles<MediumTile>(l, p);
  else
    multiply_tiles<LargeTile>(l, p);
}

}  // namespace thimble::cuda
