// Kernels for products of matrices and single vectors; matvec.cu and matvec_experts.cu launch them.
//
// A block owns tiles of eight rows of W. Each of its warps owns strips of columns: it keeps its part of x in
// registers and streams its strip of one tile after the other through its own ring in shared memory. After
// every kGroup tiles the warps' sums are added in a fixed order.
//
// Weights never change, so the rings start to fill before the kernel waits for its predecessors. Only
// kEarlySlots slots are requested that early, because a block that starts late would receive its x only after
// everything it has requested, 5 us on an H200. A launch has as many blocks as the card runs at once. With
// half as many, one per multiprocessor, a launch that starts while others end would put two blocks on a
// multiprocessor with space and none on others: decode of an 8B model took 2.78 ms per token on an H200, and
// takes 2.29 now.
//
// For experts, the matrices to multiply are known only after the router. The glu's blocks choose the experts,
// request their first weights and only then let the next kernel start. The linear's blocks therefore also
// begin after the router. They choose the experts themselves and fill their rings while they wait for the
// glu.
#pragma once

#include <algorithm>

#include "backends/cuda/dense/activation.cuh"
#include "backends/cuda/dense/groups.cuh"
#include "backends/cuda/dense/matvec.h"
#include "backends/cuda/dense/matvec_formats.cuh"
#include "backends/cuda/dense/route.cuh"
#include "backends/cuda/gate.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/shared_memory.cuh"

namespace thimble::cuda::matvec {

constexpr uint32_t kTileRows = 8;
constexpr uint32_t kGroup = 4;  // tiles; each of a warp's lanes adds up the warps' sums of one row
constexpr uint32_t kMostWarps = 16, kBlocksOfAMultiprocessor = 2;  // leave 64 registers per thread

// A warp's part of shared memory. A multiprocessor of an H200 has 228 KiB, enough for two blocks of 16 warps.
constexpr uint32_t kStageBytes = 4 * kStripColumns;          // where x passes through
constexpr uint32_t kSumsBytes = 2 * kGroup * kTileRows * 4;  // for a group and the previous one
constexpr uint32_t kWarpBytes = kRingBytes + kStageBytes + kSumsBytes;
constexpr uint32_t kScaleBytes = 16;  // per block: the norm's scale, if a warp has several strips
// Per block that chooses experts, of which there may be about 500
constexpr uint32_t kMostRouterBytes = 4 << 10;

// A matrix and the output of its product; for glu those of gate and up, in this order and of one type.
struct Matrix {
  const std::byte* w[2];
  DType type;
  uint64_t expert_bytes;  // for experts: from the start of one matrix to that of the next
  const float* bias[2];
  float* y;
  uint32_t rows, y_stride;
  uint32_t add;                  // 1: y += W x + bias
  uint32_t activates;            // 1: y = act(y) * (W x), for an up whose gate is in y
  uint32_t first_block, blocks;  // of the launch
};
struct Products {  // the products of a launch
  const float* x;
  uint32_t x_stride, cols, rows;  // rows: kStepRows, kLogitRows
  const float* norm_weight;       // null, or x must first be normalised, also into norm_y
  float* norm_y;
  float norm_eps;
  uint32_t glu, act;  // glu: 1 or 0
  // For experts: either the results of route, or the router, whose choice is made in the kernel.
  const uint32_t* first;
  const float* weight;
  uint32_t experts, chosen;
  uint32_t slots;  // `chosen`, or one more if there is a shared expert
  // For kSlotsSum: the warps of a block and the slots that they process, some at once. The last slot has its
  // own warps, the second team, if its type is another.
  struct Team {
    uint32_t first_warp, warps, first_slot, end_slot, slots_at_once;
  } team[2];
  Router router;  // logits null: the choice has been made
  // The expert that every token takes: matrices like those of the others, without biases. Its weight is the
  // sigmoid of *gate, or 1.
  struct {
    const std::byte* w[2];
    DType type;
    const float* gate;
  } shared;
  Matrix matrix[kMostSiblings];
};

// Which matrices are multiplied.
enum class Of {
  kModel,
  kSlots,    // row s of y is x times the matrix of the expert of slot s
  kSlotsSum  // y is the sum over all slots of the slot's vector times its expert's matrix and weight
};

template <typename Format>
constexpr bool kIsCodes = requires {
  Format::kPairs;
};

// Warps per block for products of experts. Fewer warps leave more registers; codes need more than 64, and so
// do sums over slots. Products of codes are limited by instructions, so they use more warps, although these
// do not fit on a multiprocessor together with the glu.
template <typename Format, Of kOf>
constexpr uint32_t kMostExpertWarps = kOf == Of::kSlots ? (kIsCodes<Format> ? 12 : kMostWarps)
                                                        : (kIsCodes<Format> ? 24 : 12);

// Slots of the ring that are requested before x: 441 tokens/s with an 8B model, 430 if all are requested. For
// a sum, x is prepared while they arrive: all slots, or if more warps request, 2.
template <typename Format, Of kOf>
constexpr uint32_t kEarlySlots = kOf != Of::kSlotsSum ? 3
                                 : kIsCodes<Format>   ? 2
                                                      : RingOf<Format>::kSlots;

// The tiles of a matrix that one of its blocks computes.
struct Share {
  uint32_t first, count;
};
// For slots, a multiprocessor gets two blocks whose numbers differ by half of the total. If shares are
// unequal, the longer ones come first, so the second half counts from the other end.
template <Of kOf>
__device__ inline uint32_t own_block() {
  return kOf == Of::kSlots && 2 * blockIdx.y >= gridDim.y ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}
__device__ inline Share share_of(const Matrix& m, uint32_t block) {
  const uint32_t tiles = (m.rows + kTileRows - 1) / kTileRows, least = tiles / m.blocks,
                 rest = tiles % m.blocks;
  return {block * least + min(block, rest), least + (block < rest)};
}

// A strip of columns in a row of W; with kSlotsSum the strip of one slot, otherwise slot is 0.
struct StripAt {
  uint32_t slot, in_row;
};

// Prefetches the lane's part of a strip; otherwise the lane would wait for it until all requested weights
// have arrived.
__device__ inline void prefetch_strip(const float* row, uint32_t column, uint32_t cols) {
  column += 8 * (threadIdx.x % kWarp);
  if (column < cols) prefetch(row + column);
}

// The scale of rms_norm for this row, from the thread's sum of squares. `sums`: four bytes per warp.
__device__ inline float norm_scale(const Products& p, float sum, uint32_t sums) {
  const uint32_t lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  sum = warp_sum(sum);
  if (lane == 0) store_float(sums + threadIdx.x / kWarp * 4, sum);
  __syncthreads();
  sum = warp_sum(lane < warps ? load_float(sums + lane * 4) : 0);
  return rms_scale(sum, p.cols, p.norm_eps);
}

// Computes the block's products with m.w[0]; with kPair = 1 those with both matrices in turns, a tile of the
// gate, then one of the up. Waits for the previous kernels. With kSlotsSum, the warps of p.team[kTeam] call
// this.
template <typename Format, uint32_t kPair, Of kOf = Of::kModel, uint32_t kTeam = 0>
__device__ void multiply_tiles(const StepParams* step, const Products& p, const Matrix& m) {
  using Ring = RingOf<Format>;
  using Strip = typename Format::Columns::Strip;
  const uint32_t rows = row_count(*step, p.rows);  // loaded before the weights are requested
  const uint32_t thread = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const Lane lane{thread / 4, thread % 4};
  const Share share = share_of(m, own_block<kOf>() - m.first_block);
  const uint32_t tiles = share.count << kPair;
  const uint32_t row_bytes = p.cols / Format::kBlock * Format::kBytes;
  const uint32_t strips = (p.cols + Format::kColumns - 1) / Format::kColumns;  // per row of W
  // A warp's strips: some columns and, for each of its own slots, the same strips one after the other, so
  // that with narrow rows it has the same columns of each.
  const Products::Team& team = p.team[kTeam];
  const bool several =
      kOf == Of::kSlotsSum ? (team.end_slot - team.first_slot) * strips > team.warps : strips > warps;
  const uint32_t of_team = warp - team.first_warp;  // for kSlotsSum
  const StripAt first_strip{kOf == Of::kSlotsSum ? team.first_slot + of_team / strips : 0,
                            kOf == Of::kSlotsSum ? of_team % strips : warp};
  const auto advance = [&](StripAt& at) {  // false: wrapped to the first one
    at.in_row += kOf == Of::kSlotsSum ? team.warps : warps;
    if (at.in_row < strips) return true;
    at.in_row = first_strip.in_row;
    if constexpr (kOf == Of::kSlotsSum) {
      at.slot += team.slots_at_once;
      if (at.slot < team.end_slot) return true;
    }
    at.slot = first_strip.slot;
    return false;
  };
  // Shared memory: stages, sums, rings, the norm's scale, the router's data.
  const uint32_t stages = kept(shared_address(shared)), stage = stages + warp * kStageBytes,
                 sums = stages + warps * kStageBytes;
  const uint32_t ring = sums + warps * kSumsBytes + warp * kRingBytes;
  // Saves a register compared to its value
  const auto scale_at = [&] { return stages + warps * kWarpBytes; };
  const auto router_memory = [&] {
    return reinterpret_cast<uint32_t*>(shared + warps * kWarpBytes + kScaleBytes);
  };

  // A warp processes a strip for all tiles of a group before the next strip. What it fetches next:
  uint32_t ahead = first_strip.in_row < strips ? 0 : tiles;
  StripAt ahead_strip = first_strip;
  const uint32_t first_row = share.first * kTileRows, tile_bytes = kTileRows * row_bytes;
  // For pairs this is the gate's tile; the up's is to_up bytes after it
  const bool is_shared = kOf == Of::kSlots && blockIdx.y == p.chosen;
  const auto matrix = [&](uint32_t i) { return is_shared ? p.shared.w[i] : m.w[i]; };
  const std::byte* from = matrix(0) + uint64_t(first_row) * row_bytes;
  const int64_t to_up = kPair ? kept(int64_t{matrix(1) - matrix(0)}) : 0;
  uint32_t expert = 0;    // for kSlots; with kSlotsSum lane s has that of slot s
  float slot_weight = 0;  // for kSlotsSum, likewise
  const auto expert_of_slot = [&](uint32_t slot) { return __shfl_sync(~0u, expert, slot); };
  int64_t to_expert = 0;  // for kSlotsSum: offset of the matrix that is fetched next
  uint32_t left =
      min(m.rows - first_row, share.count * kTileRows) * row_bytes;  // from there to the end of the share
  // Offsets of the lane's pieces in a tile, from there on. They are the same in all tiles, because tiles
  // begin at multiples of 16 bytes.
  uint32_t offsets[Ring::kCopies], sizes = 0;
  bool whole = true;  // whether all columns of the strip exist
  const uint32_t piece = kept(16 * thread);
  const auto aim = [&] {
    sizes = 0;
    whole = (ahead_strip.in_row + 1) * Format::kColumns <= p.cols;
#pragma unroll
    for (uint32_t k = 0; k < Ring::kCopies; ++k) {
      const uint32_t i = kWarp * k + thread, row = i / Ring::kRowPieces, in_row = i % Ring::kRowPieces;
      const uint32_t first = row * row_bytes + ahead_strip.in_row * Ring::kBytes,
                     at = first / 16 * 16 + 16 * in_row;
      offsets[k] = in_row < Ring::kPieces && row < kTileRows ? at : 0u - 16;
      const uint32_t end = min(first + Ring::kBytes, (row + 1) * row_bytes);
      sizes |= min(end - min(end, at), 16u) << 5 * k;
    }
  };
  const auto aim_at_expert = [&] {
    if constexpr (kOf == Of::kSlotsSum)
      to_expert = ahead_strip.slot == p.chosen ? p.shared.w[0] - m.w[0]
                                               : int64_t(m.expert_bytes * expert_of_slot(ahead_strip.slot));
  };
  const auto fetch_next = [&](uint32_t slot) {
    if (ahead < tiles) {
      const std::byte* tile = from + (kPair && ahead % 2 ? to_up : 0) + to_expert;
      const uint32_t to = slot + piece;
#pragma unroll
      for (uint32_t k = 0; k < Ring::kCopies; ++k) {
        if (Format::kBlock == 256 || whole) {
          if (offsets[k] < left) copy_async_once(to + 512 * k, tile + offsets[k]);
        } else {  // zeros follow the last column
          if (kWarp * (k + 1) <= kTileRows * Ring::kRowPieces ||
              kWarp * k + thread < kTileRows * Ring::kRowPieces)
            copy_async_once(to + 512 * k, tile + offsets[k], offsets[k] < left ? sizes >> 5 * k & 31 : 0);
        }
      }
      if (!kPair || ahead % 2) from += tile_bytes, left -= tile_bytes;
      if (++ahead % kGroup == 0 || ahead == tiles)
        if (const uint32_t in_row = ahead_strip.in_row; several) {
          if (advance(ahead_strip)) {  // the same tiles once more
            const uint32_t count = (ahead - 1) % kGroup + 1, bytes = (count >> kPair) * tile_bytes;
            ahead -= count, from -= bytes, left += bytes;
          }
          if (ahead_strip.in_row != in_row) aim();
          aim_at_expert();
        }
    }
    commit_copies();
  };

  const auto fetch_slots = [&](uint32_t first, uint32_t end) {
#pragma unroll 1
    for (uint32_t i = first; i < min(end, Ring::kSlots); ++i) fetch_next(ring + i * Ring::kSlotBytes);
  };
  // Number of columns of the strip that begins at `column`; f32 rows have strips of half as many as the lanes
  // can hold.
  const auto columns_from = [&](uint32_t column) {
    return Format::kColumns < Strip::kColumns ? min(p.cols - column, Format::kColumns) : p.cols - column;
  };
  const auto load_strip = [&](const float* row, uint32_t column) {
    return Strip::load(row + column, columns_from(column));
  };
  // The strip's first column, or the end of the row.
  const auto column_of = [&](StripAt at) { return min(at.in_row * Format::kColumns, p.cols); };
  const auto x_of = [&](StripAt at) {
    return p.x + uint64_t(kOf == Of::kSlotsSum ? at.slot : blockIdx.y) * p.x_stride;
  };
  const auto load_x = [&](StripAt at) {
    const Strip x = load_strip(x_of(at), column_of(at));
    if constexpr (kOf == Of::kSlotsSum) return x.scaled(__shfl_sync(~0u, slot_weight, at.slot));
    return x;
  };
  const auto prefetch_x = [&](StripAt at) { prefetch_strip(x_of(at), column_of(at), p.cols); };
  const auto norm = [&](const Strip& x, float scale, const Strip& weight, uint32_t column) {
    const Strip y = x.scaled(scale, weight);
    // The last block, which has the least work, stores it for ops that read it later.
    if (blockIdx.x == gridDim.x - 1)
      y.store(p.norm_y + uint64_t(blockIdx.y) * p.x_stride + column, columns_from(column));
    return y;
  };

  const uint32_t own_column = column_of(first_strip);
  Choice choice{};
  if constexpr (kOf == Of::kSlots) {
    await_predecessor();
    prefetch_x(first_strip);
    if (!is_shared) {
      if (p.router.logits) {
        choice = choose_experts(p.router, router_memory());
        expert = expert_of_bit(choice.bits, blockIdx.y);
      } else {
        expert = expert_of(p.first, p.experts, blockIdx.y);
      }
      from += expert * m.expert_bytes;
    }
  }
  if constexpr (kOf == Of::kSlotsSum) {
    if (p.router.logits) {
      choice = choose_experts(p.router, router_memory());
      for (uint32_t slot = 0; slot < p.chosen; ++slot)
        if (const uint32_t of_slot = expert_of_bit(choice.bits, slot); thread == slot) expert = of_slot;
    } else {
      await_predecessor();
      prefetch_x(first_strip);
      expert = experts_of_slots(p.first, p.experts);
    }
    aim_at_expert();
  }
  aim();
  Strip weight;
  if (p.norm_weight) weight = load_strip(p.norm_weight, own_column);
  constexpr uint32_t kEarly = kEarlySlots<Format, kOf>;
  fetch_slots(0, kEarly);
  if (p.norm_weight) weight.put(stage);
  if constexpr (kOf == Of::kSlots) {
    // Not earlier: the linear would request its weights before these.
    release_successor();
    if (choice.bits && blockIdx.x == gridDim.x - 1 && blockIdx.y == p.chosen - 1 && warp == 0)
      store_choice(p.router, choice);
  } else {
    await_predecessor();
  }
  if constexpr (kOf == Of::kModel)
    if (blockIdx.y >= rows) return wait_copies<0>();
  if constexpr (kOf == Of::kSlotsSum) {
    if (thread < p.chosen)
      slot_weight = p.weight[thread];
    else if (thread < p.slots)
      slot_weight = p.shared.gate ? sigmoid(*p.shared.gate) : 1;
  }
  // The warp's first strip of x, or of its norm, waits in the stage; in registers it would leave fewer for
  // the loop.
  Strip x = load_x(first_strip);
  if (p.norm_weight) {
    float sum = x.sum_of_squares();
#pragma unroll 1
    for (StripAt at = first_strip; advance(at);) sum += load_x(at).sum_of_squares();
    // In the space of the second group's sums
    const float scale = norm_scale(p, sum, sums + warps * kWarp * 4);
    if (several) {
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
    // The warps take turns to finish a group, one row per lane.
    const uint32_t tile = first + thread / kTileRows,
                   row = (share.first + (tile >> kPair)) * kTileRows + thread % kTileRows;
    const bool own = warp == turn && tile < tiles && row < m.rows, stores = own && (tile & kPair) == 0;
    float* const y = m.y + (uint64_t(blockIdx.y) * m.y_stride + row);
    float sum = 0;  // the lane's own sum begins with what y gets in addition to the product
    if constexpr (kOf == Of::kModel) {
      if (stores && m.bias[0]) sum = m.bias[0][row];
    } else if constexpr (kOf == Of::kSlots) {
      if (const float* bias = m.bias[tile & kPair]; own && bias) sum = bias[uint64_t(expert) * m.rows + row];
    } else if (warp == turn && m.bias[0]) {
#pragma unroll 4
      for (uint32_t slot = 0; slot < p.chosen; ++slot)
        if (const uint64_t first_bias = uint64_t(expert_of_slot(slot)) * m.rows; stores)
          sum = fmaf(p.weight[slot], m.bias[0][first_bias + row], sum);
    }
    if (stores && m.add) sum += *y;
    store_float(buffer + 4 * (warp * kWarp + thread), sum);

    const uint32_t count = min(kGroup, tiles - first);
    StripAt at = first_strip;
    for (bool more = at.in_row < strips; more; more = advance(at)) {
      if (first == 0 || several) {
        const bool is_first = first == 0 && at.in_row == first_strip.in_row && at.slot == first_strip.slot;
        const uint32_t column = column_of(at);
        Strip x;
        if (is_first) {
          x = Strip::get(stage);
        } else {
          x = load_x(at);
          if (p.norm_weight) x = norm(x, load_float(scale_at()), load_strip(p.norm_weight, column), column);
        }
        columns.template take<Format>(x, stage, lane);
        if (is_first) fetch_slots(kEarly, Ring::kSlots);
        if (StripAt next = at; advance(next)) prefetch_x(next);
        weights = lane.row * Ring::kStride + (lane.row * row_bytes + at.in_row * Ring::kBytes) % 16;
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
      if constexpr (kPair) sum = glu_of(sum, __shfl_down_sync(~0u, sum, kTileRows), p.act);
      if (stores) *y = !kPair && m.activates ? activated(*y, p.act) * sum : sum;
    }
    turn = turn + 1 == warps ? 0 : turn + 1;
  }
}

// The launch dimensions for p's first `count` matrices.
struct Shape {
  dim3 blocks;
  uint32_t threads, shared_bytes;
};
inline uint32_t strips_of(DType type, uint32_t cols) {
  const DTypeInfo& info = dtype_info(type);
  return static_cast<uint32_t>(ceil_div(cols, strip_columns(info.block, info.block_bytes)));
}
// The largest number of at most `most`, but at least 1, with which n are done in as few rounds.
inline uint32_t evenly(uint32_t n, uint32_t most) {
  return static_cast<uint32_t>(ceil_div(n, ceil_div(n, std::max(most, 1u))));
}
// Divides up to `most` warps into teams: as many for each slot as give each the same number of strips.
inline uint32_t form_teams(Products& p, uint32_t most) {
  const bool mixed = p.slots > p.chosen && p.shared.type != p.matrix[0].type;
  const uint32_t strips = strips_of(p.matrix[0].type, p.cols),
                 of_last = mixed ? evenly(strips_of(p.shared.type, p.cols), most / 3) : 0,
                 slots = mixed ? p.chosen : p.slots, at_once = evenly(slots, (most - of_last) / strips),
                 warps = evenly(strips, most - of_last) * at_once;
  p.team[0] = {0, warps, 0, slots, at_once};
  p.team[1] = {warps, of_last, slots, p.slots, 1};
  return warps + of_last;
}

// Divides the blocks among the matrices.
inline Shape share_out(const Launch& l, Products& p, uint32_t count, Of of = Of::kModel,
                       uint32_t most_warps = kMostWarps) {
  uint32_t tiles[kMostSiblings], strips = 0;
  uint64_t row_bytes[kMostSiblings];
  for (uint32_t i = 0; i < count; ++i) {
    Matrix& m = p.matrix[i];
    m.blocks = 1;
    tiles[i] = static_cast<uint32_t>(ceil_div(m.rows, kTileRows));
    row_bytes[i] = dtype_bytes(m.type, p.cols);
    strips = std::max(strips, strips_of(m.type, p.cols));
  }
  const uint32_t vectors = of == Of::kSlots ? p.slots : of == Of::kSlotsSum ? 1 : most_rows(l, p.rows);
  // Uses as many warps as give each the same number of strips, and as many blocks as run at once. Each
  // further block goes to the matrix whose blocks have the most bytes to read.
  constexpr uint32_t kSystem = 1 << 10;  // shared memory that the system reserves per block
  const uint32_t router_bytes = p.router.logits ? router_words(p.experts) * 4 : 0;
  most_warps = std::min(most_warps, (l.card.shared_bytes - kScaleBytes - router_bytes) / kWarpBytes);
  const uint32_t warps = of == Of::kSlotsSum ? form_teams(p, most_warps) : evenly(strips, most_warps);
  const uint32_t shared_bytes = warps * kWarpBytes + kScaleBytes + router_bytes;
  const uint32_t fit =
      (l.card.shared_bytes + kSystem) / static_cast<uint32_t>(round_up(shared_bytes, kSystem) + kSystem);
  // Each block of a glu chooses its experts and prepares x; two blocks are better at that than four with
  // fewer warps (427 tokens/s for the shape of qwen3-30b-a3b on an H100, instead of 418). The blocks of a
  // linear prepare the x of all slots, and one of them fits on a multiprocessor together with the glu's.
  const uint32_t run = of == Of::kSlotsSum ? 1
                       : of == Of::kSlots  ? kBlocksOfAMultiprocessor
                                           : kBlocksOfAMultiprocessor * kMostWarps / warps;
  const uint32_t at_once = l.card.multiprocessors * std::min(fit, run) / (of == Of::kSlots ? p.slots : 1);
  for (uint32_t blocks = count; blocks < at_once; ++blocks) {
    uint32_t longest = kMostSiblings;
    uint64_t most = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t bytes = ceil_div(tiles[i], p.matrix[i].blocks) * row_bytes[i];
      if (p.matrix[i].blocks < tiles[i] && bytes > most) longest = i, most = bytes;
    }
    if (longest == kMostSiblings) break;  // all tiles are divided
    ++p.matrix[longest].blocks;
  }
  uint32_t first = 0;
  for (uint32_t i = 0; i < kMostSiblings; ++i) {
    Matrix& m = p.matrix[i];
    m.first_block = i < count ? first : ~0u;
    first += m.blocks;
  }
  return {dim3(first, vectors), warps * kWarp, shared_bytes};
}

}  // namespace thimble::cuda::matvec
