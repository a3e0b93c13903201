// attention of a single row to the pool, if values are channels of the keys. The query heads of a KV head
// form a tile of query vectors, so a block reads every row once for up to 32 of them. The blocks of a KV head
// share its entries, and a second kernel combines their results.
#include <algorithm>

#include "backends/cuda/attention/attended.cuh"
#include "backends/cuda/attention/attention.h"
#include "backends/cuda/attention/latent_tiles.cuh"
#include "backends/cuda/attention/pool_rows.cuh"

namespace thimble::cuda {
namespace {

// The results of blocks, of up to `width` channels: outputs before the division by the sum, and {maximum,
// sum}; [query heads][blocks of the KV head] each.
struct LatentParts {
  float* out;
  float2* peak_and_sum;
  // Index of the first part of a query head, whose number is within its group.
  __device__ static uint32_t first(const HeadBlocks& own, uint32_t group, uint32_t query_head) {
    return own.first * group + query_head * own.count;
  }
};
// How many of a KV head's blocks have tiles, if its list is as long as it can be. The others leave no parts.
template <uint32_t kKeys>
__device__ uint32_t used_blocks(const HeadBlocks& own) {
  return min(own.count, (own.work + kKeys - 1) / kKeys);
}

// Rotates the thread's chunks of a tile, in place. The key of row r has index `first` + r, where `first` is a
// multiple of the tile's rows, so all rows of a tile share the angles of the table's high half. With 64 rows,
// the angles of its low half are the same in every tile.
template <typename Shape>
class TileTurn {
  static constexpr bool kSameLow = Shape::kKeys == 64;
  static_assert(64 % Shape::kKeys == 0);

 public:
  __device__ TileTurn(const Rope& rope, const RopeParams& p)
      : rope_(rope), halves_(p.pairing == kRopeHalves), unit_(threadIdx.x % 8) {
    const uint32_t half_units = p.n_rot / 16;
    upper_ = halves_ && unit_ >= half_units;
    rotates_ = p.mode == kRopeList && unit_ < p.n_rot / 8;
    partner_ = !halves_ ? unit_ : upper_ ? unit_ - half_units : unit_ + half_units;
    first_pair_ = halves_ ? (upper_ ? partner_ : unit_) * 8 : unit_ * 4;
    if (kSameLow && rotates_) ask_low(0);
  }
  // Loads the angles for a tile, before it has arrived.
  __device__ void ask(uint32_t first) {
    if (!rotates_) return;
    load(64 + first / 64, high_);
    if (!kSameLow) ask_low(first % 64);
  }
  // A warp calls this when its lanes' copies have arrived.
  __device__ void rotate(uint4* tile) const {
    __syncwarp();  // the copies of other lanes are visible
    Unit own[kOwnRows<Shape>], other[kOwnRows<Shape>];
#pragma unroll
    for (uint32_t i = 0; i < kOwnRows<Shape>; ++i) {
      if (!rotates_) continue;
      own[i].bits = tile[LatentMemory<Shape>::place(own_row<Shape>(i), unit_)];
      if (halves_) other[i].bits = tile[LatentMemory<Shape>::place(own_row<Shape>(i), partner_)];
    }
    __syncwarp();  // no lane reads them any more
#pragma unroll
    for (uint32_t i = 0; i < kOwnRows<Shape>; ++i) {
      if (!rotates_) continue;
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const float2 x = __half22float2(own[i].pairs[j]);
        float2 turned;
        if (halves_) {
          const float2 y = __half22float2(other[i].pairs[j]), a = angle(i, 2 * j), b = angle(i, 2 * j + 1);
          turned = upper_ ? float2{y.x * a.y + x.x * a.x, y.y * b.y + x.y * b.x}
                          : float2{x.x * a.x - y.x * a.y, x.y * b.x - y.y * b.y};
        } else {
          const float2 a = angle(i, j);
          turned = {x.x * a.x - x.y * a.y, x.x * a.y + x.y * a.x};
        }
        own[i].pairs[j] = __float22half2_rn(turned);
      }
      tile[LatentMemory<Shape>::place(own_row<Shape>(i), unit_)] = own[i].bits;
    }
  }

 private:
  union Unit {  // 8 channels
    uint4 bits;
    __half2 pairs[4];
  };
  // Loads a row of the table: 8 pairs, or 4 if pairs are adjacent channels.
  __device__ void load(uint32_t row, float2 (&to)[8]) const {
    const auto* const from =
        reinterpret_cast<const float4*>(rope_.table + uint64_t(row) * rope_.pairs + first_pair_);
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      if (!halves_ && j >= 2) break;
      const float4 two = from[j];
      to[2 * j] = {two.x, two.y};
      to[2 * j + 1] = {two.z, two.w};
    }
  }
  __device__ void ask_low(uint32_t first) {
#pragma unroll
    for (uint32_t i = 0; i < kOwnRows<Shape>; ++i) load(first + own_row<Shape>(i), low_[i]);
  }
  // As Rope::angle().
  __device__ float2 angle(uint32_t i, uint32_t pair) const {
    const float2 high = high_[pair], low = low_[i][pair];
    return {high.x * low.x - high.y * low.y, high.x * low.y + high.y * low.x};
  }

  Rope rope_;
  bool halves_, rotates_, upper_;
  uint32_t unit_, partner_, first_pair_;
  float2 high_[8], low_[kOwnRows<Shape>][8];
};

// Grid: (block among those of a KV head, KV head, pass over its group).
template <typename Format, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attend_pool_latent_kernel(const StepParams* step, const HeadState* table, AttentionParams p,
                              const float* q, const typename Format::Unit* k, const uint32_t* lists,
                              Rope rope, LatentParts parts) {
  extern __shared__ uint4 shared[];
  constexpr uint32_t kKeys = Shape::kKeys;
  const LatentMemory<Shape> memory(shared);
  release_successor();
  const StepParams s = *step;
  const HeadBlocks own_blocks = blocks_around(Attended(s, table, p, lists != nullptr));
  const HeadState state = table[p.first_head + min(own_blocks.head, p.heads - 1)];
  await_predecessor();
  if (own_blocks.head == p.heads) return;  // a surplus block
  const uint32_t block = block_of_heads() - own_blocks.first, blocks = used_blocks<kKeys>(own_blocks);
  if (block >= blocks) return;

  const uint32_t head = p.first_head + own_blocks.head, first_head = blockIdx.z * Shape::kVectors;
  const uint32_t heads = min(Shape::kVectors, p.group - first_head);  // of the group, in this pass
  EntryList list = entry_list(lists, head, p.list_capacity, step_entries(s, state));
  // Only differences of list indices affect rotations, so indices may count from the first entry of the
  // window.
  const uint32_t hidden = p.window && list.count > p.window ? list.count - p.window : 0;
  list.count -= hidden;
  if (list.entries) list.entries += hidden;
  const uint64_t run = uint64_t(state.first) + (list.entries ? 0 : hidden);
  const uint32_t tiles = (list.count + kKeys - 1) / kKeys;
  const uint32_t first_tile = uint64_t(tiles) * block / blocks,
                 end_tile = uint64_t(tiles) * (block + 1) / blocks;

  // The entries of the thread's rows are loaded a tile ahead.
  const uint32_t row_units = Format::row_units(p.head_dim);
  uint32_t entries[kOwnRows<Shape>];
  const auto ask = [&](uint32_t tile) {
#pragma unroll
    for (uint32_t i = 0; i < kOwnRows<Shape>; ++i) {
      const uint32_t index = tile * kKeys + own_row<Shape>(i);
      entries[i] = index < list.count ? list[index] : 0;
    }
  };
  const auto load = [&](uint32_t tile) {
#pragma unroll
    for (uint32_t i = 0; i < kOwnRows<Shape>; ++i) {
      const uint32_t row = own_row<Shape>(i);
      copy_row<Shape, Format>(memory.tile(tile), row, k + (run + entries[i]) * row_units,
                              tile * kKeys + row < list.count, p.head_dim);
    }
  };
  if (first_tile < end_tile) {
    ask(first_tile);
    load(first_tile);
    ask(first_tile + 1);
  }
  commit_copies();

  const bool by_list = p.rope.mode == kRopeList;
  const uint32_t position = by_list ? list.count - 1 : static_cast<uint32_t>(s.position);
  const float* const own_queries = q + uint64_t(head * p.group + first_head) * p.head_dim;
  load_latent_queries(memory, p, rope, [&](uint32_t vector) {
    return LatentQuery{vector < heads ? own_queries + vector * p.head_dim : nullptr, position};
  });
  LatentTiles<Shape> rows(
      memory, p.rope.n_rot,
      [](uint32_t) {
        return float2{-kInfinity, 0};
      },
      [](uint32_t, uint32_t) {
        return float2{0, 0};
      });
  TileTurn<Shape> turn(rope, p.rope);
#pragma unroll 1
  for (uint32_t tile = first_tile; tile < end_tile; ++tile) {
    if (tile != first_tile) __syncthreads();  // the previous tile is no longer needed
    if (tile + 1 < end_tile) {
      load(tile + 1);
      ask(tile + 2);
    }
    commit_copies();
    turn.ask(tile * kKeys);
    wait_copies<1>();
    if (by_list) turn.rotate(memory.tile(tile));
    __syncthreads();  // the tile, and before the first one the queries, are visible
    const uint32_t there = list.count - tile * kKeys;
    rows.add(memory.tile(tile), p.cap * kLog2E, there < kKeys, [&](uint32_t) { return uint2{0, there}; });
  }
  rows.end();
  const uint32_t width = p.head_dim - p.rope.n_rot;
  rows.each_output(
      [&](uint32_t vector, float2 peak_and_sum, bool writes) -> float* {
        if (vector >= heads) return nullptr;
        const uint64_t part = LatentParts::first(own_blocks, p.group, first_head + vector) + block;
        if (writes) parts.peak_and_sum[part] = peak_and_sum;
        return parts.out + part * width;
      },
      [&](float* out, uint32_t channel, float2 x) {
        if (out && channel < width) *reinterpret_cast<float2*>(out + channel) = x;
      });
}

// Grid: (query head, 128 channels of it). A warp adds every 16th part, and a lane has four channels.
constexpr uint32_t kCombiningWarps = 16, kSlice = 4 * kWarp;

template <uint32_t kKeys>
__global__ void __launch_bounds__(kCombiningWarps* kWarp)
    combine_latent_kernel(const StepParams* step, const HeadState* table, AttentionParams p, bool has_list,
                          uint32_t each, LatentParts parts, const float* sinks, float* y) {
  constexpr uint32_t kAtOnce = 10;  // parts per warp: all of an H200's 132
  __shared__ float4 sums[kCombiningWarps][kWarp];
  release_successor();
  const HeadBlocks own =
      blocks_of_head(blockIdx.x / p.group, each, p.heads, Attended(*step, table, p, has_list));
  const uint32_t count = used_blocks<kKeys>(own),
                 first_part = LatentParts::first(own, p.group, blockIdx.x % p.group);
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, width = p.head_dim - p.rope.n_rot,
                 channel = blockIdx.y * kSlice + 4 * lane;
  // A sink is a part without a value.
  float peak = sinks ? sinks[blockIdx.x] * kLog2E : -kInfinity, sum = 0;
  const float sink = peak;
  const float2* const states = parts.peak_and_sum + first_part;
  const float* const outs = parts.out + uint64_t(first_part) * width + channel;
  await_predecessor();
  float4 x[kAtOnce];
  const auto ask = [&](uint32_t first) {
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t part = first + i * kCombiningWarps + warp;
      x[i] = {0, 0, 0, 0};
      if (part < count && channel < width)
        x[i] = *reinterpret_cast<const float4*>(outs + uint64_t(part) * width);
    }
  };
  ask(0);
#pragma unroll 4
  for (uint32_t part = lane; part < count; part += kWarp) peak = fmaxf(peak, states[part].x);
  peak = warp_max(peak);
  const float base = peak == -kInfinity ? 0 : peak;
#pragma unroll 4
  for (uint32_t part = lane; part < count; part += kWarp)
    sum += states[part].y * fast_exp2(states[part].x - base);
  sum = warp_sum(sum) + fast_exp2(sink - base);
  float4 total{0, 0, 0, 0};
  for (uint32_t first = 0; first < count; first += kAtOnce * kCombiningWarps) {
    if (first != 0) ask(first);
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t part = first + i * kCombiningWarps + warp;
      const float factor = part < count ? fast_exp2(states[part].x - base) : 0;
      total = {total.x + x[i].x * factor, total.y + x[i].y * factor, total.z + x[i].z * factor,
               total.w + x[i].w * factor};
    }
  }
  sums[warp][lane] = total;
  __syncthreads();
  const uint32_t own_channel = blockIdx.y * kSlice + threadIdx.x;
  if (threadIdx.x >= kSlice || own_channel >= width) return;
  float all = 0;
#pragma unroll
  for (uint32_t w = 0; w < kCombiningWarps; ++w) all += reinterpret_cast<const float*>(sums[w])[threadIdx.x];
  y[uint64_t(blockIdx.x) * width + own_channel] = all / sum;
}

template <typename Format, typename Shape>
void attend(const Launch& l, const Attention& op) {
  const AttentionParams& p = op.p;
  const uint32_t queries = p.heads * p.group, width = op.value_cols();
  const PoolGrid grid = pool_grid(l.card, p.heads, p.group, Shape::kVectors);
  float* const out = reinterpret_cast<float*>(l.scratch);
  const LatentParts parts{out, reinterpret_cast<float2*>(out + uint64_t(grid.each) * queries * width)};
  launch(l, attend_pool_latent_kernel<Format, Shape>, dim3(grid.each, p.heads, grid.passes), Shape::kThreads,
         Shape::kShared, l.step, l.heads + p.head_state, p, data<float>(op.q),
         data<typename Format::Unit>(op.k.values), data<uint32_t>(op.list),
         Rope{data<float2>(op.rope), p.rope.n_rot / 2}, parts);
  launch(l, combine_latent_kernel<Shape::kKeys>,
         dim3(queries, static_cast<uint32_t>(ceil_div(width, kSlice))), kCombiningWarps * kWarp, 0, l.step,
         l.heads + p.head_state, p, bool(op.list), grid.each, parts,
         op.sinks ? data<float>(op.sinks) + p.first_head * p.group : nullptr,
         data<float>(op.y) + p.first_head * p.group * width);
}

// For cards with 227 KiB of shared memory for a block, and for all.
using Few = LatentShape<16, 64, true>;
using Many = LatentShape<32, 64, true>;
using Small = LatentShape<16, 32, true>;
using Narrow = LatentShape<16, 32, false>;
static_assert(Few::kShared <= Many::kShared && Narrow::kShared <= Small::kShared &&
              Small::kShared <= 99 << 10);

template <typename Format>
void attend(const Launch& l, const Attention& op) {
  if (is_narrow(op.p)) return attend<Format, Narrow>(l, op);
  if (l.card.shared_bytes < Many::kShared) return attend<Format, Small>(l, op);
  op.p.group <= Few::kVectors ? attend<Format, Few>(l, op) : attend<Format, Many>(l, op);
}

}  // namespace

bool takes_latent(const AttentionParams& p) {
  const uint32_t n_rot = p.rope.n_rot;
  return p.head_dim % 8 == 0 && n_rot % 16 == 0 && n_rot < p.head_dim && n_rot <= Many::kMostRotated &&
         p.head_dim <= Many::kDim && p.head_dim - n_rot <= Many::kValues;
}

void attend_pool_latent(const Launch& l, const Attention& op) {
  with_format(op.k.type, [&]<typename Format>(Format) {
    if constexpr (Format::kPlain) attend<Format>(l, op);
  });
}

uint64_t attend_pool_latent_scratch(const ModelShape& m, const SessionShape&, const Card& card) {
  return uint64_t(std::max(m.heads, card.multiprocessors * Many::kVectors)) * (m.head_dim + 2) *
         sizeof(float);
}

}  // namespace thimble::cuda
