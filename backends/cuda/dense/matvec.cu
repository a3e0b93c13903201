// A block owns tiles of eight rows of W. Each of its warps owns strips of columns: it keeps what it needs of
// x in registers and streams its strip of one tile after the other through a ring of its own in shared
// memory. After every kGroup tiles the warps' sums meet, in fixed order.
//
// Weights never change, so the rings begin to fill before the kernel waits for the ones before it: with
// kEarlySlots, because a block that starts late would get its x only behind all that it has asked for, 5 us
// on an H200. A launch has as many blocks as the card holds at once. With half as many, one a multiprocessor,
// a launch that starts while others end would put two where there is room and leave multiprocessors without:
// decode of an 8B model took 2.78 ms a token of an H200, and takes 2.29.
#include <algorithm>

#include "backends/cuda/dense/activation.cuh"
#include "backends/cuda/dense/matvec.h"
#include "backends/cuda/dense/matvec_any.h"
#include "backends/cuda/dense/matvec_formats.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/shared_memory.cuh"

namespace thimble::cuda {
namespace {

using namespace matvec;

constexpr uint32_t kTileRows = 8;
constexpr uint32_t kGroup = 4;  // tiles; a warp's lanes have a row each when they add up the warps' sums
constexpr uint32_t kMostWarps = 16, kBlocksOfAMultiprocessor = 2;  // leave 64 registers for a thread

constexpr uint32_t kEarlySlots = 3;  // of a ring: 441 tokens/s of an 8B model, 430 with all of them

// A warp's part of shared memory. An H200's multiprocessor has 228 KiB, room for two blocks of 16 warps.
constexpr uint32_t kStageBytes = 4 * kStripColumns;          // where x passes through
constexpr uint32_t kSumsBytes = 2 * kGroup * kTileRows * 4;  // of a group, and of the one before
constexpr uint32_t kWarpBytes = kRingBytes + kStageBytes + kSumsBytes;
constexpr uint32_t kScaleBytes = 16;  // of a block: the norm's scale, where a warp takes several strips

// A matrix and where its product goes; for glu the gate's and the up's, in this order.
struct Matrix {
  const std::byte* w[2];
  DType type[2];
  const float* bias;
  float* y;
  uint32_t rows, y_stride;
  uint32_t add;                  // 1: y += W x + bias
  uint32_t first_block, blocks;  // of the launch
};
struct Products {  // of a launch
  const float* x;
  uint32_t x_stride, cols, rows;  // rows: kStepRows, kLogitRows
  const float* norm_weight;       // null, or x is yet to become its rms_norm, for norm_y too
  float* norm_y;
  float norm_eps;
  uint32_t glu, act;  // glu: 1 or 0
  Matrix matrix[kMostSiblings];
};

// The tiles of a matrix that one of its blocks takes.
struct Share {
  uint32_t first, count;
};
__device__ Share share_of(const Matrix& m, uint32_t block) {
  const uint32_t tiles = (m.rows + kTileRows - 1) / kTileRows, least = tiles / m.blocks,
                 rest = tiles % m.blocks;
  return {block * least + min(block, rest), least + (block < rest)};
}

// Asks for the lane's part of a strip ahead of time; otherwise it would wait for it behind all the weights
// that are under way.
__device__ void prefetch_strip(const float* row, uint32_t column, uint32_t cols) {
  column += 8 * (threadIdx.x % kWarp);
  if (column < cols) asm volatile("prefetch.global.L1 [%0];" ::"l"(row + column));
}

// What rms_norm scales this row with, from the sum of the squares that the thread has. `sums`: four bytes a
// warp.
__device__ float norm_scale(const Products& p, float sum, uint32_t sums) {
  const uint32_t lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  sum = warp_sum(sum);
  if (lane == 0) store_float(sums + threadIdx.x / kWarp * 4, sum);
  __syncthreads();
  sum = warp_sum(lane < warps ? load_float(sums + lane * 4) : 0);
  return 1.0f / sqrtf(sum / static_cast<float>(p.cols) + p.norm_eps);
}

// The block's products with m.w[which]; with kPair = 1 those with both, in turns: a tile of the gate, then
// the up's. The up's products without a pair find the gate's in y. The first call also waits for the kernels
// before this one.
template <typename Format, uint32_t kPair>
__device__ void multiply_tiles(const StepParams* step, const Products& p, const Matrix& m, uint32_t which) {
  using Ring = RingOf<Format>;
  using Strip = typename Format::Columns::Strip;
  const uint32_t rows = row_count(*step, p.rows);  // asked for ahead of the weights, too
  const uint32_t thread = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const Lane lane{thread / 4, thread % 4};
  const Share share = share_of(m, blockIdx.x - m.first_block);
  const uint32_t tiles = share.count << kPair;
  const uint32_t row_bytes = p.cols / Format::kBlock * Format::kBytes;
  const uint32_t all_strips = (p.cols + Format::kColumns - 1) / Format::kColumns;
  // Shared memory: stages, sums, rings, the norm's scale.
  const uint32_t stages = kept(shared_address(shared)), stage = stages + warp * kStageBytes,
                 sums = stages + warps * kStageBytes;
  const uint32_t ring = sums + warps * kSumsBytes + warp * kRingBytes;
  const auto scale_at = [&] { return stages + warps * kWarpBytes; };  // a register fewer than its value

  // A warp takes strips warp, warp + warps and so on, each for all tiles of a group before the next. What it
  // fetches next:
  uint32_t ahead = warp < all_strips ? 0 : tiles, ahead_strip = warp;
  const uint32_t first_row = share.first * kTileRows, tile_bytes = kTileRows * row_bytes;
  const std::byte* from =
      m.w[which] + uint64_t(first_row) * row_bytes;  // for pairs the gate's tile, the up's is to_up away
  const int64_t to_up = kPair ? kept(int64_t{m.w[1] - m.w[0]}) : 0;
  uint32_t left =
      min(m.rows - first_row, share.count * kTileRows) * row_bytes;  // from there to the end of the share
  // Where the lane's pieces of a tile lie, from there on: the same in all tiles, since they begin at
  // multiples of 16 bytes.
  uint32_t offsets[Ring::kCopies], sizes = 0;
  const uint32_t piece = kept(16 * thread);
  const auto aim = [&] {
    sizes = 0;
#pragma unroll
    for (uint32_t k = 0; k < Ring::kCopies; ++k) {
      const uint32_t i = kWarp * k + thread, row = i / Ring::kRowPieces, in_row = i % Ring::kRowPieces;
      const uint32_t first = row * row_bytes + ahead_strip * Ring::kBytes, at = first / 16 * 16 + 16 * in_row;
      offsets[k] = in_row < Ring::kPieces && row < kTileRows ? at : 0u - 16;
      const uint32_t end = min(first + Ring::kBytes, (row + 1) * row_bytes);
      sizes |= min(end - min(end, at), 16u) << 5 * k;
    }
  };
  const auto fetch_next = [&](uint32_t slot) {
    if (ahead < tiles) {
      const std::byte* tile = from + (kPair && ahead % 2 ? to_up : 0);
      const uint32_t to = slot + piece;
#pragma unroll
      for (uint32_t k = 0; k < Ring::kCopies; ++k) {
        if constexpr (Format::kBlock == 256) {
          if (offsets[k] < left) copy_async_once(to + 512 * k, tile + offsets[k]);
        } else {  // a strip may end before its last column: zeros follow
          if (kWarp * (k + 1) <= kTileRows * Ring::kRowPieces ||
              kWarp * k + thread < kTileRows * Ring::kRowPieces)
            copy_async_once(to + 512 * k, tile + offsets[k], offsets[k] < left ? sizes >> 5 * k & 31 : 0);
        }
      }
      if (!kPair || ahead % 2) from += tile_bytes, left -= tile_bytes;
      if (++ahead % kGroup == 0 || ahead == tiles)
        if (const uint32_t strip = ahead_strip; warps < all_strips) {
          ahead_strip = strip + warps < all_strips ? strip + warps : warp;
          if (ahead_strip > strip) {  // once more the same tiles
            const uint32_t count = (ahead - 1) % kGroup + 1, bytes = (count >> kPair) * tile_bytes;
            ahead -= count, from -= bytes, left += bytes;
          }
          aim();
        }
    }
    commit_copies();
  };

  const auto fetch_slots = [&](uint32_t first, uint32_t end) {
#pragma unroll 1
    for (uint32_t i = first; i < min(end, Ring::kSlots); ++i) fetch_next(ring + i * Ring::kSlotBytes);
  };
  // Columns of the strip that begins there: f32 rows have strips of half as many as the lanes can hold.
  const auto columns_from = [&](uint32_t column) {
    return Format::kColumns < Strip::kColumns ? min(p.cols - column, Format::kColumns) : p.cols - column;
  };
  const auto load_strip = [&](const float* row, uint32_t column) {
    return Strip::load(row + column, columns_from(column));
  };
  const auto load_x = [&](uint32_t column) {
    return load_strip(p.x + uint64_t(blockIdx.y) * p.x_stride, column);
  };
  const auto norm = [&](const Strip& x, float scale, const Strip& weight, uint32_t column) {
    const Strip y = x.scaled(scale, weight);
    // The last block, which has least to do, keeps it for those that read it later.
    if (blockIdx.x == gridDim.x - 1)
      y.store(p.norm_y + uint64_t(blockIdx.y) * p.x_stride + column, columns_from(column));
    return y;
  };

  aim();
  const uint32_t own_column = min(warp * Format::kColumns, p.cols), next_columns = warps * Format::kColumns;
  Strip weight;
  if (p.norm_weight) weight = load_strip(p.norm_weight, own_column);
  fetch_slots(0, kEarlySlots);
  if (p.norm_weight) weight.put(stage);
  await_predecessor();
  if (blockIdx.y >= rows) return wait_copies<0>();
  // The warp's first strip of x, or of its norm, waits in the stage: in registers it would leave the loop
  // fewer.
  Strip x = load_x(own_column);
  if (p.norm_weight) {
    float sum = x.sum_of_squares();
#pragma unroll 1
    for (uint32_t column = own_column + next_columns; column < p.cols; column += next_columns)
      sum += load_x(column).sum_of_squares();
    const float scale = norm_scale(p, sum, sums + warps * kWarp * 4);  // in the second group's sums
    if (all_strips > warps) {
      if (threadIdx.x == 0) store_float(scale_at(), scale);
      __syncthreads();
    }
    x = norm(x, scale, Strip::get(stage), own_column);
  }
  x.put(stage);
  typename Format::Columns columns;
  uint32_t weights = 0;  // where the lane's row begins in a slot

  uint32_t slot = ring, turn = 0;
  for (uint32_t first = 0; first < tiles; first += kGroup) {
    const uint32_t buffer = sums + first / kGroup % 2 * (warps * kWarp * 4);
    // The warp whose turn it is finishes the group, a lane a row.
    const uint32_t tile = first + thread / kTileRows,
                   row = (share.first + (tile >> kPair)) * kTileRows + thread % kTileRows;
    const bool stores = warp == turn && tile < tiles && (tile & kPair) == 0 && row < m.rows;
    float* const y = m.y + (uint64_t(blockIdx.y) * m.y_stride + row);
    float sum = 0;  // its own begins with what y gets beside the product
    if (stores && m.bias) sum = m.bias[row];
    if (stores && m.add) sum += *y;
    store_float(buffer + 4 * (warp * kWarp + thread), sum);

    const uint32_t count = min(kGroup, tiles - first);
    for (uint32_t strip = warp; strip < all_strips; strip += warps) {
      if (first == 0 || all_strips > warps) {
        const bool is_first = first == 0 && strip == warp;
        const uint32_t column = strip * Format::kColumns;
        Strip x;
        if (is_first) {
          x = Strip::get(stage);
        } else {
          x = load_x(column);
          if (p.norm_weight) x = norm(x, load_float(scale_at()), load_strip(p.norm_weight, column), column);
        }
        columns.template take<Format>(x, stage, lane);
        if (is_first) fetch_slots(kEarlySlots, Ring::kSlots);
        prefetch_strip(p.x + uint64_t(blockIdx.y) * p.x_stride, column + next_columns, p.cols);
        weights = lane.row * Ring::kStride + (lane.row * row_bytes + strip * Ring::kBytes) % 16;
      }
      uint32_t sum_at = buffer + 4 * (warp * kWarp + lane.row);
      for (const uint32_t end = sum_at + 4 * kTileRows * count; sum_at < end; sum_at += 4 * kTileRows) {
        wait_copies<Ring::kSlots - 1>();
        __syncwarp();
        float product = Format::multiply(slot + weights, columns, lane);
        product += __shfl_xor_sync(~0u, product, 1);
        product += __shfl_xor_sync(~0u, product, 2);
        if (lane.part == 0) store_float(sum_at, load_float(sum_at) + product);
        __syncwarp();
        fetch_next(slot);
        slot = slot == ring + (Ring::kSlots - 1) * Ring::kSlotBytes ? ring : slot + Ring::kSlotBytes;
      }
    }
    __syncthreads();
    if (warp == turn) {
      sum = 0;
#pragma unroll 4
      for (uint32_t k = 0; k < warps; ++k) sum += load_float(buffer + 4 * (k * kWarp + thread));
      if constexpr (kPair) sum = activated(sum, p.act) * __shfl_down_sync(~0u, sum, kTileRows);
      if (stores) *y = !kPair && which ? activated(*y, p.act) * sum : sum;
    }
    turn = turn + 1 == warps ? 0 : turn + 1;
  }
}

// Whether there is such a row of x.
__device__ bool begin(const StepParams* step, const Products& p) {
  release_successor();
  if (blockIdx.y == 0) return true;  // most often there is one row: do not fetch weights for others in vain
  await_predecessor();
  return blockIdx.y < row_count(*step, p.rows);
}
// The matrix of the launch that a block belongs to.
__device__ uint32_t matrix_of(const Products& p) {
  return (blockIdx.x >= p.matrix[1].first_block) + (blockIdx.x >= p.matrix[2].first_block);
}

// Row blockIdx.y of x times matrices of these formats, or pairs of matrices of the same format.
template <uint32_t kPair, typename... Formats>
__global__ void __launch_bounds__(kMostWarps* kWarp, kBlocksOfAMultiprocessor)
    multiply_vectors_kernel(const StepParams* step, const __grid_constant__ Products p) {
  if (!begin(step, p)) return;
  const Matrix& m = p.matrix[kPair ? 0 : matrix_of(p)];
  if constexpr (sizeof...(Formats) == 1)
    (multiply_tiles<Formats, kPair>(step, p, m, 0), ...);
  else
    ((m.type[0] == Formats::kType ? multiply_tiles<Formats, kPair>(step, p, m, 0) : void()), ...);
}
// A pair of matrices of different formats.
template <typename... Formats>
__global__ void __launch_bounds__(kMostWarps* kWarp, kBlocksOfAMultiprocessor)
    multiply_both_kernel(const StepParams* step, const __grid_constant__ Products p) {
  if (!begin(step, p)) return;
  const Matrix& m = p.matrix[0];
  for (uint32_t which = 0; which < 2; ++which) {
    if (which) __syncthreads();  // the gate's products are in y, and nobody reads their sums any more
    ((m.type[which] == Formats::kType ? multiply_tiles<Formats, 0>(step, p, m, which) : void()), ...);
  }
}

using Kernel = void (*)(const StepParams*, Products);

template <typename... Formats>
struct KernelsOf {
  static bool know(DType type) { return ((type == Formats::kType) || ...); }
  static Kernel for_all() { return multiply_vectors_kernel<0, Formats...>; }
  static Kernel for_both() { return multiply_both_kernel<Formats...>; }
  static Kernel for_one(DType type, bool pair) {
    Kernel kernel = nullptr;
    ((type == Formats::kType
          ? void(kernel = pair ? multiply_vectors_kernel<1, Formats> : multiply_vectors_kernel<0, Formats>)
          : void()),
     ...);
    return kernel;
  }
};
// A kernel of one format, or of those that Q4_K_M and Q5_K_M files mix, keeps what its loop needs in
// registers; those of every format do not.
using KFormats = KernelsOf<GroupsOf32<DType::kQ4_K>, GroupsOf32<DType::kQ5_K>, GroupsOf16>;
using AllFormats =
    KernelsOf<Plain<DType::kF32>, Plain<DType::kF16>, Plain<DType::kBF16>, Bytes, BlocksOf32<DType::kQ4_0>,
              BlocksOf32<DType::kQ4_1>, BlocksOf32<DType::kQ5_0>, BlocksOf32<DType::kQ5_1>,
              GroupsOf32<DType::kQ4_K>, GroupsOf32<DType::kQ5_K>, GroupsOf16>;

// Launches the products of p's first `count` matrices, whose blocks are still to be shared out.
void launch_products(const Launch& l, Products& p, uint32_t count) {
  uint32_t tiles[kMostSiblings], strips = 0;
  uint64_t row_bytes[kMostSiblings];
  bool same = true, k_formats = true;
  for (uint32_t i = 0; i < count; ++i) {
    Matrix& m = p.matrix[i];
    m.blocks = 1;
    tiles[i] = static_cast<uint32_t>(ceil_div(m.rows, kTileRows));
    row_bytes[i] = dtype_bytes(m.type[0], p.cols);
    for (uint32_t j = 0; j <= p.glu; ++j) {
      const DTypeInfo& type = dtype_info(m.type[j]);
      strips = std::max(strips,
                        static_cast<uint32_t>(ceil_div(p.cols, strip_columns(type.block, type.block_bytes))));
      same &= m.type[j] == p.matrix[0].type[0];
      k_formats &= KFormats::know(m.type[j]);
    }
  }
  // As many warps as have the same number of strips, and as many blocks as run at once; each of these goes
  // where a block has most bytes to read.
  constexpr uint32_t kSystem = 1 << 10;  // of shared memory, beside every block's
  const uint32_t most_warps = std::min(kMostWarps, (l.card.shared_bytes - kScaleBytes) / kWarpBytes);
  const uint32_t warps = static_cast<uint32_t>(ceil_div(strips, ceil_div(strips, most_warps)));
  const uint32_t shared_bytes = warps * kWarpBytes + kScaleBytes;
  const uint32_t fit =
      (l.card.shared_bytes + kSystem) / static_cast<uint32_t>(round_up(shared_bytes, kSystem) + kSystem);
  const uint32_t at_once =
      l.card.multiprocessors * std::min(fit, kBlocksOfAMultiprocessor * kMostWarps / warps);
  for (uint32_t blocks = count; blocks < at_once; ++blocks) {
    uint32_t longest = kMostSiblings;
    uint64_t most = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t bytes = ceil_div(tiles[i], p.matrix[i].blocks) * row_bytes[i];
      if (p.matrix[i].blocks < tiles[i] && bytes > most) longest = i, most = bytes;
    }
    if (longest == kMostSiblings) break;  // no tile is left to share
    ++p.matrix[longest].blocks;
  }
  uint32_t first = 0;
  for (uint32_t i = 0; i < kMostSiblings; ++i) {
    Matrix& m = p.matrix[i];
    m.first_block = i < count ? first : ~0u;
    first += m.blocks;
  }
  const Kernel kernel = same        ? AllFormats::for_one(p.matrix[0].type[0], p.glu)
                        : p.glu     ? AllFormats::for_both()
                        : k_formats ? KFormats::for_all()
                                    : AllFormats::for_all();
  launch(l, kernel, dim3(first, most_rows(l, p.rows)), warps * kWarp, shared_bytes, l.step, p);
}

// Products that read x, or what `norm` makes of its x.
Products products_of(const View& x, uint32_t x_stride, uint32_t cols, uint32_t rows, const RmsNorm* norm) {
  Products p{};
  p.x = data<float>(norm ? norm->x : x);
  p.x_stride = x_stride;
  p.cols = cols;
  p.rows = rows;
  if (norm) {
    p.norm_weight = data<float>(norm->weight);
    p.norm_y = data<float>(norm->y);
    p.norm_eps = norm->p.eps;
  }
  return p;
}

// One by one, the norm before them: where there is a type without a format.
void multiply_one_by_one(const Launch& l, std::span<const Linear> siblings, const RmsNorm* norm) {
  if (norm) rms_norm(l, *norm);
  for (const Linear& op : siblings) {
    if (AllFormats::know(op.w.type)) {
      multiply_vectors(l, {&op, 1}, nullptr);
      continue;
    }
    multiply_any(l, op.w,
                 {.rows = op.p.out_cols,
                  .cols = op.p.in_cols,
                  .x = data<float>(op.x),
                  .x_stride = op.p.x_stride,
                  .x_rows = op.p.rows,
                  .y = data<float>(op.y),
                  .y_stride = op.p.y_stride,
                  .bias = data<float>(op.bias),
                  .add = op.p.add != 0});
  }
}
void multiply_one_by_one(const Launch& l, const Glu& op, const RmsNorm* norm) {
  if (norm) rms_norm(l, *norm);
  AnyProduct p{.rows = op.p.out_cols,
               .cols = op.p.in_cols,
               .x = data<float>(op.x),
               .x_stride = op.p.in_cols,
               .y = data<float>(op.h),
               .y_stride = op.p.out_cols,
               .act = op.p.act};
  multiply_any(l, op.gate, p);
  p.activates = true;
  multiply_any(l, op.up, p);
}

}  // namespace

void multiply_vectors(const Launch& l, std::span<const Linear> siblings, const RmsNorm* norm) {
  if (!std::all_of(siblings.begin(), siblings.end(),
                   [](const Linear& op) { return AllFormats::know(op.w.type); }))
    return multiply_one_by_one(l, siblings, norm);
  const LinearParams& first = siblings[0].p;
  Products p = products_of(siblings[0].x, first.x_stride, first.in_cols, first.rows, norm);
  uint32_t count = 0;
  for (const Linear& op : siblings) {
    Matrix& m = p.matrix[count++];
    m.w[0] = data<std::byte>(op.w);
    m.type[0] = op.w.type;
    m.bias = data<float>(op.bias);
    m.y = data<float>(op.y);
    m.rows = op.p.out_cols;
    m.y_stride = op.p.y_stride;
    m.add = op.p.add;
  }
  launch_products(l, p, count);
}

void multiply_vectors(const Launch& l, const Glu& op, const RmsNorm* norm) {
  if (!AllFormats::know(op.gate.type) || !AllFormats::know(op.up.type))
    return multiply_one_by_one(l, op, norm);
  Products p = products_of(op.x, op.p.in_cols, op.p.in_cols, kStepRows, norm);
  p.glu = 1;
  p.act = op.p.act;
  Matrix& m = p.matrix[0];
  m.w[0] = data<std::byte>(op.gate);
  m.w[1] = data<std::byte>(op.up);
  m.type[0] = op.gate.type;
  m.type[1] = op.up.type;
  m.y = data<float>(op.h);
  m.rows = m.y_stride = op.p.out_cols;
  launch_products(l, p, 1);
}

}  // namespace thimble::cuda
