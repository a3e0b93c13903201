// attention of a single row to the pool. Each warp attends to a share of the list with a running maximum and
// sum, a block combines its warps, and a second kernel combines the blocks of a head. With a short list the
// kernel is a chain of waits, so it loads as early as possible.
#include "backends/cuda/attention/attended.cuh"
#include "backends/cuda/attention/attention.h"
#include "backends/cuda/attention/pool_rows.cuh"
#include "backends/cuda/head_blocks.cuh"
#include "backends/cuda/rope.cuh"
#include "backends/cuda/soft_cap.cuh"

namespace thimble::cuda {

constexpr uint32_t kTile =
    64;  // list entries per tile; keys rotate by their index in it, the query by the rest
constexpr float kLog2E = 1.44269504f;  // queries are scaled by it, so that the softmax works in base 2

// Where a lane's four pairs of channels are stored in a row. Pair i of a lane is pair 4 * chunk + i of the
// head. Pairs from n_rot / 2 on do not rotate, so any two channels can form one.
enum class Pairs {
  kAdjacent,  // 8 neighbouring channels
  // 4 channels, and the 4 that are n_rot / 2 after them; or 8 neighbouring channels if nothing rotates
  kHalves,
  kAny,  // n_rot / 2 is not a multiple of 4, so only some of a lane's pairs may rotate; or it is 0
};
template <Pairs kPairs>
struct LanePairs {
  uint32_t first, pairs, pairing;  // first: 4 * chunk; pairs: the head's rotating pairs

  __device__ bool rotates(uint32_t i) const { return first + i < pairs; }
  __device__ uint32_t x(uint32_t i) const {
    if constexpr (kPairs == Pairs::kAdjacent) return 2 * (first + i);
    if constexpr (kPairs == Pairs::kHalves) return (rotates(0) ? first : 2 * first) + i;
    return rotates(i) ? first_of_pair(first + i, pairing) : 2 * (first + i);
  }
  __device__ uint32_t y(uint32_t i) const {
    if constexpr (kPairs == Pairs::kAdjacent) return 2 * (first + i) + 1;
    if constexpr (kPairs == Pairs::kHalves) return (rotates(0) ? pairs + first : 2 * first + 4) + i;
    return rotates(i) ? second_of_pair(first + i, pairing, pairs) : 2 * (first + i) + 1;
  }
  // Loads the lane's pairs from a row of numbers, which is 16-byte aligned except for kAny.
  __device__ void load(const float* row, float (&a)[4], float (&b)[4]) const {
    if constexpr (kPairs == Pairs::kAny) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        a[i] = row[x(i)];
        b[i] = row[y(i)];
      }
    } else {
      const float4 low = *reinterpret_cast<const float4*>(row + x(0)),
                   high = *reinterpret_cast<const float4*>(row + (kPairs == Pairs::kAdjacent ? x(2) : y(0)));
      const float channels[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        a[i] = channels[kPairs == Pairs::kAdjacent ? 2 * i : i];
        b[i] = channels[kPairs == Pairs::kAdjacent ? 2 * i + 1 : 4 + i];
      }
    }
  }
  // The same from a row of the pool.
  template <typename Format>
  __device__ void load(const uint4* chunks, float (&a)[4], float (&b)[4]) const {
    const auto* row = reinterpret_cast<const typename Format::Unit*>(chunks);
    if constexpr (kPairs == Pairs::kAny) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        a[i] = Format::load(row, x(i));
        b[i] = Format::load(row, y(i));
      }
      return;
    }
    float channels[8];
    if constexpr (kPairs == Pairs::kAdjacent) {
      const uint4 words = chunks[first / 4];
      Format::widen(words, channels);
    } else {
      Format::load_four(row, x(0), channels);
      Format::load_four(row, y(0), channels + 4);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      a[i] = channels[kPairs == Pairs::kAdjacent ? 2 * i : i];
      b[i] = channels[kPairs == Pairs::kAdjacent ? 2 * i + 1 : 4 + i];
    }
  }
};

// Loads the angles {cos, sin} of a lane's pairs.
__device__ static void load_angles(const float2* at, float2 (&angles)[4]) {
  const float4 low = reinterpret_cast<const float4*>(at)[0], high = reinterpret_cast<const float4*>(at)[1];
  angles[0] = {low.x, low.y};
  angles[1] = {low.z, low.w};
  angles[2] = {high.x, high.y};
  angles[3] = {high.z, high.w};
}
// The angles by which a lane's keys rotate at each index in a tile. A lane whose keys do not rotate reads
// index 0, where every angle is {1, 0}.
template <Pairs kPairs>
struct KeyTurn {
  const float2* table;     // the low half of the rope table
  uint32_t start, stride;  // start: the lane's pairs at index 0; stride: from one index to the next
  bool rotates[4];

  __device__ KeyTurn(const LanePairs<kPairs>& lane, const float2* low_half, bool by_list) : table(low_half) {
    const bool turns = by_list && (kPairs == Pairs::kAny || lane.rotates(0));
    start = turns ? lane.first : 0;
    stride = turns ? lane.pairs : 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) rotates[i] = turns && lane.rotates(i);
  }
  __device__ void rotate(uint32_t place, float (&x)[4], float (&y)[4]) const {
    const float2* at = table + (start + place * stride);
    float2 angle[4];
    if constexpr (kPairs == Pairs::kAny) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) angle[i] = rotates[i] ? at[i] : float2{1, 0};
    } else {
      load_angles(at, angle);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float a = x[i], b = y[i];
      x[i] = a * angle[i].x - b * angle[i].y;
      y[i] = a * angle[i].y + b * angle[i].x;
    }
  }
};

// Three stages of 8 rows, or six of 4: 12 KiB per warp at 128 channels, two thirds of it in flight. A
// multiprocessor needs about 30 KiB in flight. With 4 heads of 8 channels, as query and as output, 12 warps
// get the 160 registers per thread that the kernel needs; with 8 heads 8 warps do.
template <uint32_t kLanes, uint32_t kHeads, typename Format>
using Stream = RowStream<kLanes, kHeads, 2, kHeads == 4 ? 3 : 6, Format>;
template <uint32_t kLanes, uint32_t kHeads>
constexpr uint32_t kMostWarps = kLanes <= 16 && kHeads == 4 ? 12 : 8;
template <uint32_t kLanes, uint32_t kHeads, typename Format>
constexpr uint32_t kWarpBytes = Stream<kLanes, kHeads, Format>::kBytes +
                                kWarp * sizeof(float);  // and the weights of a step

// The low half of the rope table is used by every key of a rotating head, so it is in shared memory: the
// first-level cache has 28 KiB left when shared memory is at its maximum, and the table takes 32 KiB at 128
// channels. At 256 channels it would reduce the number of warps, and so would the queries, which are stored
// after it.
template <uint32_t kLanes>
constexpr bool kHasRoom = kLanes <= 16;

// The partial results of blocks. For each query head: the output before division by the sum, and {maximum,
// sum}; [query heads][blocks of the KV head] each. If a block had no rows, the maximum is -inf and the rest
// is 0.
struct Parts {
  float* out;  // head_dim floats each
  float2* peak_and_sum;
  // Index of the first part of a query head, whose number is within its group.
  __device__ static uint32_t first(const HeadBlocks& own, uint32_t group, uint32_t query_head) {
    return own.first * group + query_head * own.count;
  }
};

// Combines the peaks and sums of several parts and computes the factor of each part's output. A factor of 0
// marks a part without rows, whose output may be NaN.
template <uint32_t kParts>
__device__ static float2 weigh(const float2 (&parts)[kParts], float (&factors)[kParts]) {
  float2 all{-kInfinity, 0};
#pragma unroll
  for (uint32_t i = 0; i < kParts; ++i) all.x = fmaxf(all.x, parts[i].x);
#pragma unroll
  for (uint32_t i = 0; i < kParts; ++i) {
    factors[i] = parts[i].x > -kInfinity ? exp2f(parts[i].x - all.x) : 0;
    if (factors[i] != 0) all.y += parts[i].y * factors[i];
  }
  return all;
}

// Grid: (block among those of a KV head, pass over its group).
template <typename Format, uint32_t kLanes, uint32_t kHeads, Pairs kPairs>
static __global__ void __launch_bounds__(kMostWarps<kLanes, kHeads>* kWarp, 1)
    attend_pool_kernel(const StepParams* step, const HeadState* table, AttentionParams p, const float* q,
                       const typename Format::Unit* k, const typename Format::Unit* v, const uint32_t* lists,
                       Rope rope, Parts parts) {
  using S = Step<kLanes, kHeads>;
  constexpr uint32_t kWarps = kMostWarps<kLanes, kHeads>;
  extern __shared__ uint4 shared[];  // [warps] stream and weights of a step, then table, then queries
  const uint32_t warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  std::byte* const own = reinterpret_cast<std::byte*>(shared) + warp * kWarpBytes<kLanes, kHeads, Format>;
  float* const weights =
      reinterpret_cast<float*>(own + Stream<kLanes, kHeads, Format>::kBytes);  // [S::kRows][kHeads]
  uint4* const kept_table = shared + warps * kWarpBytes<kLanes, kHeads, Format> / sizeof(uint4);
  uint4* const kept_queries = kept_table + kTile * rope.pairs / 2;
  release_successor();
  if constexpr (kHasRoom<kLanes>)
    for (uint32_t i = threadIdx.x; i < kTile * rope.pairs / 2; i += blockDim.x)
      copy_async<16>(kept_table + i, reinterpret_cast<const uint4*>(rope.table) + i);
  const bool by_list = p.rope.mode == kRopeList;
  // The model's attention factor applies to query and key, but the low half of the table, which rotates keys,
  // lacks it.
  const float factor = by_list && rope.pairs ? rope.factor() : 1;
  const StepParams s = *step;
  const HeadBlocks own_blocks = blocks_around(Attended(s, table, p, lists != nullptr));
  const HeadState state = table[p.first_head + min(own_blocks.head, p.heads - 1)];
  await_predecessor();
  if (own_blocks.head == p.heads) {  // a surplus block
    commit_copies();
    return wait_copies<0>();
  }

  const uint32_t head = p.first_head + own_blocks.head, first_head = blockIdx.z * kHeads;
  // Heads of the group in this pass; the others up to kHeads are zeros
  const uint32_t heads = min(kHeads, p.group - first_head);
  const float* own_queries = q + (head * p.group + first_head) * p.head_dim;
  EntryList list = entry_list(lists, head, p.list_capacity, step_entries(s, state));
  // If the list is full, the warp's first entries are where the capacity says, so they are loaded together
  // with the count.
  const uint32_t all_warps = own_blocks.count * warps,
                 place = warp * own_blocks.count + block_of_heads() - own_blocks.first;
  const uint32_t full_first = place * rows_per_warp(p.list_capacity - 1, all_warps, S::kRows);
  uint32_t entry = list.entries ? list.entries[min(full_first + lane, p.list_capacity - 2)] : 0;
  const uint32_t own_position = static_cast<uint32_t>(s.position);
  const float2* low_half = rope.table;
  if constexpr (kHasRoom<kLanes>) {
    for (uint32_t i = threadIdx.x; i < heads * p.head_dim / 4; i += blockDim.x)
      copy_async<16>(kept_queries + i, reinterpret_cast<const uint4*>(own_queries) + i);
    low_half = reinterpret_cast<const float2*>(kept_table);
    own_queries = reinterpret_cast<const float*>(kept_queries);
  }
  commit_copies();

  const uint32_t chunk = lane % kLanes, side = lane / kLanes;
  const LanePairs<kPairs> pairs{4 * chunk, rope.pairs, p.rope.pairing};
  // Only differences of list indices affect rotations, so indices may count from the first entry of the
  // window.
  const uint32_t hidden = p.window && list.count > p.window ? list.count - p.window : 0;
  list.count -= hidden;
  if (list.entries) list.entries += hidden;
  const uint32_t share = rows_per_warp(list.count, all_warps, S::kRows);
  const uint32_t first = min(place * share, list.count), end = min(first + share, list.count);
  if (!list.entries)
    entry = first + lane;
  else if (first + hidden != full_first && first + lane < end)
    entry = list[first + lane];
  // The rotary position of the query for the keys of a tile, which are rotated by their index in it. Its
  // angles are the product of a row of the table's high half, which is prefetched, and a row of the low half.
  const auto query_position = [&](uint32_t tile) { return by_list ? list.count - 1 - tile : own_position; };
  const uint32_t first_pair = pairs.rotates(0) ? 4 * chunk : 0;
  float2 high[4];
  const auto ask_high = [&](uint32_t position) {
    if constexpr (kPairs != Pairs::kAny)
      load_angles(rope.table + uint64_t(64 + position / 64) * rope.pairs + first_pair, high);
  };
  if (first < end) ask_high(query_position(first - first % kTile));
  const uint64_t run = uint64_t(state.first) + (list.entries ? 0 : hidden);
  Stream<kLanes, kHeads, Format> stream({k, v}, run, p.head_dim, list.entries, first, end, entry, own);

  const KeyTurn<kPairs> turn(pairs, low_half, by_list);
  float query[kHeads][8];  // the lane's pairs: four first channels, four second channels
  const auto rotate_queries = [&](uint32_t position) {
    float2 angles[4];
    if constexpr (kPairs == Pairs::kAny) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        if (pairs.rotates(i)) angles[i] = rope.angle(position, 4 * chunk + i);
    } else {
      float2 low[4];
      load_angles(low_half + position % 64 * rope.pairs + first_pair, low);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        angles[i] = {high[i].x * low[i].x - high[i].y * low[i].y,
                     high[i].x * low[i].y + high[i].y * low[i].x};
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      angles[i] = pairs.rotates(i) ? float2{angles[i].x * factor, angles[i].y * factor} : float2{1, 0};
#pragma unroll
    for (uint32_t h = 0; h < kHeads; ++h) {
      float x[4] = {}, y[4] = {};
      if (h < heads && chunk * 8 < p.head_dim) pairs.load(own_queries + h * p.head_dim, x, y);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const float a = x[i] * (p.scale * kLog2E), b = y[i] * (p.scale * kLog2E);
        query[h][i] = a * angles[i].x - b * angles[i].y;
        query[h][4 + i] = a * angles[i].y + b * angles[i].x;
      }
    }
  };
  wait_copies<Stream<kLanes, kHeads, Format>::kCopies>();  // waits for the table and the queries
  __syncthreads();

  // peak and sum belong to head lane % kHeads; the lane's sum covers only the rows that it scored itself.
  float peak = -kInfinity, sum = 0, out[kHeads][8] = {};
#pragma unroll 1
  for (uint32_t start = first; start < end; start += S::kRows) {
    const uint32_t first_row = start % kTile;
    if (start == first || (by_list && first_row == 0)) {
      const uint32_t position = query_position(start - first_row);
      rotate_queries(position);
      if (by_list && position >= kTile) ask_high(position - kTile);
    }
    stream.await();

    float scores[kLanes];  // [S::kRounds][kHeads]
#pragma unroll
    for (uint32_t r = 0; r < S::kRounds; ++r) {
      const uint32_t row = r * S::kAtOnce + side;
      float x[4], y[4];
      pairs.template load<Format>(stream.row(0, row), x, y);
      turn.rotate(first_row + row, x, y);
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h) {
        float dot = 0;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) dot += query[h][i] * x[i];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) dot += query[h][4 + i] * y[i];
        scores[r * kHeads + h] = dot;
      }
    }
    const uint32_t own_row = chunk / kHeads * S::kAtOnce + side;
    float sum_of_products = sum_across<kLanes>(scores);
    if (p.cap != 0) sum_of_products = soft_cap(sum_of_products, p.cap * kLog2E);
    const float score = start + own_row < end ? sum_of_products : -kInfinity;

    float top = score;
#pragma unroll
    for (uint32_t offset = kHeads; offset < kWarp; offset *= 2)
      top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    if (__any_sync(~0u, top > peak)) {
      const float shrink = top > peak ? exp2f(peak - top) : 1;
      peak = fmaxf(peak, top);
      sum *= shrink;
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h) {
        const float of_head = __shfl_sync(~0u, shrink, h);
#pragma unroll
        for (uint32_t c = 0; c < 8; ++c) out[h][c] *= of_head;
      }
    }
    const float weight = exp2f(score - peak);
    sum += weight;
    weights[own_row * kHeads + lane % kHeads] = weight;
    __syncwarp();

#pragma unroll
    for (uint32_t r = 0; r < S::kRounds; ++r) {
      const uint32_t row = r * S::kAtOnce + side;
      float value[8];
      Format::widen(stream.row(1, row)[chunk], value);
#pragma unroll
      for (uint32_t four = 0; four < kHeads; four += 4) {
        const float4 w = *reinterpret_cast<const float4*>(weights + row * kHeads + four);
#pragma unroll
        for (uint32_t c = 0; c < 8; ++c) {
          out[four][c] += w.x * value[c];
          out[four + 1][c] += w.y * value[c];
          out[four + 2][c] += w.z * value[c];
          out[four + 3][c] += w.w * value[c];
        }
      }
    }
    stream.release();
  }

  // Combine the warp's lanes, then the block's warps, in order. A warp without rows has a peak of -inf and
  // adds zeros.
#pragma unroll
  for (uint32_t offset = kHeads; offset < kWarp; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
#pragma unroll
  for (uint32_t offset = kLanes; offset < kWarp; offset *= 2)
#pragma unroll
    for (uint32_t h = 0; h < kHeads; ++h)
#pragma unroll
      for (uint32_t c = 0; c < 8; ++c) out[h][c] += __shfl_xor_sync(~0u, out[h][c], offset);
  if (lane < kHeads) reinterpret_cast<float2*>(weights)[lane] = {peak, sum};
  float4* const own_out =
      reinterpret_cast<float4*>(own);  // [kHeads][kLanes * 2]: the stages of the stream are no longer used
  if (side == 0)
#pragma unroll
    for (uint32_t h = 0; h < kHeads; ++h) {
      float4* const to = own_out + (h * kLanes + chunk) * 2;
      to[0] = {out[h][0], out[h][1], out[h][2], out[h][3]};
      to[1] = {out[h][4], out[h][5], out[h][6], out[h][7]};
    }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < heads * p.head_dim / 4; i += blockDim.x) {
    const uint32_t h = i / (p.head_dim / 4), four = i % (p.head_dim / 4);
    float2 of_warp[kWarps];
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) {
      of_warp[w] = {-kInfinity, 0};
      if (w < warps)
        of_warp[w] = *reinterpret_cast<const float2*>(
            reinterpret_cast<const std::byte*>(shared) + w * kWarpBytes<kLanes, kHeads, Format> +
            Stream<kLanes, kHeads, Format>::kBytes + h * sizeof(float2));
    }
    float factors[kWarps];
    const float2 of_all = weigh(of_warp, factors);
    float4 total{0, 0, 0, 0};
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) {
      if (factors[w] == 0) continue;
      const float4 x =
          reinterpret_cast<const float4*>(reinterpret_cast<const std::byte*>(shared) +
                                          w * kWarpBytes<kLanes, kHeads, Format>)[h * kLanes * 2 + four];
      total = {total.x + x.x * factors[w], total.y + x.y * factors[w], total.z + x.z * factors[w],
               total.w + x.w * factors[w]};
    }
    const uint64_t part =
        Parts::first(own_blocks, p.group, first_head + h) + block_of_heads() - own_blocks.first;
    reinterpret_cast<float4*>(parts.out + part * p.head_dim)[four] = total;
    if (four == 0) parts.peak_and_sum[part] = of_all;
  }
}

// Heads of 512 channels. A lane has chunks `lane` and `lane` + 32 of a row. A warp loads two rows at a time
// straight into registers, since the stages of a ring would take too much shared memory.
constexpr uint32_t kWideDim = 512, kWideHeads = 4, kWideWarps = 8, kWideRows = 2;

template <typename Format, Pairs kPairs>
static __global__ void __launch_bounds__(kWideWarps* kWarp, 1)
    attend_pool_wide_kernel(const StepParams* step, const HeadState* table, AttentionParams p, const float* q,
                            const typename Format::Unit* k, const typename Format::Unit* v,
                            const uint32_t* lists, Rope rope, Parts parts) {
  extern __shared__ float4 outs[];  // [warps][kWideHeads][kWideDim / 4]
  __shared__ float2 peaks_and_sums[kWideWarps][kWideHeads];
  const StepParams s = begin_kernel(step);
  const HeadBlocks own_blocks = blocks_around(Attended(s, table, p, lists != nullptr));
  if (own_blocks.head == p.heads) return;  // a surplus block
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t head = p.first_head + own_blocks.head, first_head = blockIdx.z * kWideHeads;
  const uint32_t heads = min(kWideHeads, p.group - first_head);
  const float* const own_queries = q + (head * p.group + first_head) * kWideDim;
  const HeadState state = table[head];
  EntryList list = entry_list(lists, head, p.list_capacity, step_entries(s, state));
  // As in attend_pool_kernel: the entries of the window, and the warp's share of them.
  const uint32_t hidden = p.window && list.count > p.window ? list.count - p.window : 0;
  list.count -= hidden;
  if (list.entries) list.entries += hidden;
  const uint32_t place = warp * own_blocks.count + block_of_heads() - own_blocks.first;
  const uint32_t share = rows_per_warp(list.count, own_blocks.count * kWideWarps, kWideRows);
  const uint32_t first = min(place * share, list.count), end = min(first + share, list.count);
  const uint64_t run = uint64_t(state.first) + (list.entries ? 0 : hidden);
  const uint32_t row_units = Format::row_units(kWideDim);
  const auto row_of = [&](const typename Format::Unit* rows, uint32_t i) {
    return reinterpret_cast<const uint4*>(rows + (run + list[min(i, end - 1)]) * row_units);
  };

  const bool by_list = p.rope.mode == kRopeList;
  const float factor = by_list && rope.pairs ? rope.factor() : 1;
  const LanePairs<kPairs> pairs[2] = {{4 * lane, rope.pairs, p.rope.pairing},
                                      {4 * (lane + kWarp), rope.pairs, p.rope.pairing}};
  const KeyTurn<kPairs> turns[2] = {{pairs[0], rope.table, by_list}, {pairs[1], rope.table, by_list}};
  float query[kWideHeads][2][8];  // the lane's pairs: four first channels, four second channels
  const auto rotate_queries = [&](uint32_t position) {
#pragma unroll
    for (uint32_t chunk = 0; chunk < 2; ++chunk) {
      float2 angles[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        angles[i] = {1, 0};
        if (!pairs[chunk].rotates(i)) continue;
        const float2 angle = rope.angle(position, pairs[chunk].first + i);
        angles[i] = {angle.x * factor, angle.y * factor};
      }
#pragma unroll
      for (uint32_t h = 0; h < kWideHeads; ++h) {
        float x[4] = {}, y[4] = {};
        if (h < heads) pairs[chunk].load(own_queries + h * kWideDim, x, y);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const float a = x[i] * (p.scale * kLog2E), b = y[i] * (p.scale * kLog2E);
          query[h][chunk][i] = a * angles[i].x - b * angles[i].y;
          query[h][chunk][4 + i] = a * angles[i].y + b * angles[i].x;
        }
      }
    }
  };

  // Lane i has the scores of row i / 4 % 2 and head i % 4, and the maximum and sum of these scores alone.
  const uint32_t own_row = lane / kWideHeads % kWideRows;
  float peak = -kInfinity, sum = 0, out[kWideHeads][2][8] = {};
#pragma unroll 1
  for (uint32_t start = first; start < end; start += kWideRows) {
    if (start == first || (by_list && start % kTile == 0))
      rotate_queries(by_list ? list.count - 1 - (start - start % kTile) : static_cast<uint32_t>(s.position));
    float scores[kWideRows * kWideHeads] = {};
#pragma unroll
    for (uint32_t r = 0; r < kWideRows; ++r) {
      const uint4* const key = row_of(k, start + r);
#pragma unroll
      for (uint32_t chunk = 0; chunk < 2; ++chunk) {
        float x[4], y[4];
        pairs[chunk].template load<Format>(key, x, y);
        turns[chunk].rotate(start % kTile + r, x, y);
#pragma unroll
        for (uint32_t h = 0; h < kWideHeads; ++h)
#pragma unroll
          for (uint32_t i = 0; i < 4; ++i)
            scores[r * kWideHeads + h] += query[h][chunk][i] * x[i] + query[h][chunk][4 + i] * y[i];
      }
    }
    float score = sum_across<kWideRows * kWideHeads>(scores);
    score += __shfl_xor_sync(~0u, score, 8);
    score += __shfl_xor_sync(~0u, score, 16);
    if (p.cap != 0) score = soft_cap(score, p.cap * kLog2E);
    if (start + own_row >= end) score = -kInfinity;
    const float top = fmaxf(score, __shfl_xor_sync(~0u, score, kWideHeads));
    if (__any_sync(~0u, top > peak)) {
      const float shrink = top > peak ? exp2f(peak - top) : 1;
      peak = fmaxf(peak, top);
      sum *= shrink;
#pragma unroll
      for (uint32_t h = 0; h < kWideHeads; ++h) {
        const float of_head = __shfl_sync(~0u, shrink, h);
#pragma unroll
        for (uint32_t i = 0; i < 16; ++i) out[h][i / 8][i % 8] *= of_head;
      }
    }
    const float weight = exp2f(score - peak);
    sum += weight;
#pragma unroll
    for (uint32_t r = 0; r < kWideRows; ++r) {
      const uint4* const row = row_of(v, start + r);
      float weights[kWideHeads];
#pragma unroll
      for (uint32_t h = 0; h < kWideHeads; ++h) weights[h] = __shfl_sync(~0u, weight, r * kWideHeads + h);
#pragma unroll
      for (uint32_t chunk = 0; chunk < 2; ++chunk) {
        float value[8];
        Format::widen(row[lane + chunk * kWarp], value);
#pragma unroll
        for (uint32_t h = 0; h < kWideHeads; ++h)
#pragma unroll
          for (uint32_t c = 0; c < 8; ++c) out[h][chunk][c] += weights[h] * value[c];
      }
    }
  }

  sum += __shfl_xor_sync(~0u, sum, kWideHeads);  // the other row's
  if (lane < kWideHeads) peaks_and_sums[warp][lane] = {peak, sum};
#pragma unroll
  for (uint32_t h = 0; h < kWideHeads; ++h)
#pragma unroll
    for (uint32_t chunk = 0; chunk < 2; ++chunk) {
      float4* const to = outs + (warp * kWideHeads + h) * (kWideDim / 4) + (lane + chunk * kWarp) * 2;
      const float(&from)[8] = out[h][chunk];
      to[0] = {from[0], from[1], from[2], from[3]};
      to[1] = {from[4], from[5], from[6], from[7]};
    }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < heads * (kWideDim / 4); i += kWideWarps * kWarp) {
    const uint32_t h = i / (kWideDim / 4), four = i % (kWideDim / 4);
    float2 of_warp[kWideWarps];
#pragma unroll
    for (uint32_t w = 0; w < kWideWarps; ++w) of_warp[w] = peaks_and_sums[w][h];
    float factors[kWideWarps];
    const float2 of_all = weigh(of_warp, factors);
    float4 total{0, 0, 0, 0};
#pragma unroll
    for (uint32_t w = 0; w < kWideWarps; ++w) {
      if (factors[w] == 0) continue;
      const float4 x = outs[(w * kWideHeads + h) * (kWideDim / 4) + four];
      total = {total.x + x.x * factors[w], total.y + x.y * factors[w], total.z + x.z * factors[w],
               total.w + x.w * factors[w]};
    }
    const uint64_t part =
        Parts::first(own_blocks, p.group, first_head + h) + block_of_heads() - own_blocks.first;
    reinterpret_cast<float4*>(parts.out + part * kWideDim)[four] = total;
    if (four == 0) parts.peak_and_sum[part] = of_all;
  }
}

// One block per query head, one thread per channel; every warp computes peak and sum itself. With at most 56
// registers the kernel fits on a multiprocessor together with a block of attend_pool_kernel, so the work that
// it does ahead costs nothing.
static __global__ void combine_parts_kernel(const StepParams* step, const HeadState* table, AttentionParams p,
                                            bool has_list, uint32_t each, Parts parts, const float* sinks,
                                            float* y) {
  release_successor();
  const HeadBlocks own_blocks =
      blocks_of_head(blockIdx.x / p.group, each, p.heads, Attended(*step, table, p, has_list));
  const uint32_t head_dim = p.head_dim, splits = own_blocks.count,
                 own_parts = Parts::first(own_blocks, p.group, blockIdx.x % p.group);
  // A sink is a part without a value. It is loaded from memory, which takes 2 us, before the wait.
  float peak = sinks ? sinks[blockIdx.x] * kLog2E : -kInfinity, sum = sinks ? 1 : 0, total = 0;
  await_predecessor();
  // A card of 132 multiprocessors has 16 parts for each of 8 equal KV heads, and up to 125 for a head that
  // holds nearly all entries. The next kAtOnce parts are loaded while the previous ones are added.
  constexpr uint32_t kAtOnce = 16;
  const uint32_t lane = threadIdx.x % kWarp, c = min(threadIdx.x, head_dim - 1);
  float next[kAtOnce];
  float2 next_own;
  const auto ask = [&](uint32_t first) {
    const uint32_t part = own_parts + first;
    next_own = {-kInfinity, 0};
    if (lane < kAtOnce && first + lane < splits) next_own = parts.peak_and_sum[part + lane];
    const float* const out = parts.out + uint64_t(part) * head_dim + c;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) next[i] = first + i < splits ? out[i * head_dim] : 0;
  };
  ask(0);
  for (uint32_t first = 0; first < splits; first += kAtOnce) {
    const float2 own = next_own;
    float x[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) x[i] = next[i];
    if (first + kAtOnce < splits) ask(first + kAtOnce);
    const float top = fmaxf(peak, warp_max(own.x));
    const float factor = own.x > -kInfinity ? exp2f(own.x - top) : 0,
                shrink = peak > -kInfinity ? exp2f(peak - top) : 0;
    sum = sum * shrink + warp_sum(own.y * factor);
    total *= shrink;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const float of_part = __shfl_sync(~0u, factor, i);
      total += x[i] * of_part;
    }
    peak = top;
  }
  if (threadIdx.x < head_dim) y[blockIdx.x * head_dim + c] = total / sum;
}

// Adds the kernel that attends to the program, put(parts, rope), and the kernel that combines its parts.
template <typename Put>
static void attend_and_combine(const Launch& l, const Attention& op, const PoolGrid& grid, const Put& put) {
  const AttentionParams& p = op.p;
  const uint32_t queries = p.heads * p.group;
  float* const out = reinterpret_cast<float*>(l.scratch);
  const Parts parts{out, reinterpret_cast<float2*>(out + uint64_t(grid.each) * queries * p.head_dim)};
  put(parts, Rope{data<float2>(op.rope), p.rope.n_rot / 2});
  launch(l, combine_parts_kernel, queries, static_cast<uint32_t>(round_up(p.head_dim, kWarp)), 0, l.step,
         l.heads + p.head_state, p, bool(op.list), grid.each, parts,
         op.sinks ? data<float>(op.sinks) + p.first_head * p.group : nullptr,
         data<float>(op.y) + p.first_head * p.group * p.head_dim);
}

template <typename Format, Pairs kPairs>
static void attend_wide(const Launch& l, const Attention& op) {
  using Unit = typename Format::Unit;
  constexpr uint32_t kBytes = kWideWarps * kWideHeads * kWideDim * sizeof(float);
  const AttentionParams& p = op.p;
  const PoolGrid grid = pool_grid(l.card, p.heads, p.group, kWideHeads);
  attend_and_combine(l, op, grid, [&](const Parts& parts, const Rope& rope) {
    launch(l, attend_pool_wide_kernel<Format, kPairs>, dim3(grid.each, p.heads, grid.passes),
           kWideWarps * kWarp, kBytes, l.step, l.heads + p.head_state, p, data<float>(op.q),
           data<Unit>(op.k.values), data<Unit>(op.v.values), data<uint32_t>(op.list), rope, parts);
  });
}

template <typename Format, uint32_t kLanes, uint32_t kHeads, Pairs kPairs>
static void attend(const Launch& l, const Attention& op) {
  using Unit = typename Format::Unit;
  constexpr uint32_t kBytes = kWarpBytes<kLanes, kHeads, Format>;
  const AttentionParams& p = op.p;
  const PoolGrid grid = pool_grid(l.card, p.heads, p.group, kHeads);
  const uint32_t table_bytes = kTile * p.rope.n_rot / 2 * sizeof(float2),
                 query_bytes = kHeads * p.head_dim * sizeof(float);
  const uint32_t block_bytes = kHasRoom<kLanes> ? table_bytes + query_bytes : 0;
  const uint32_t warps = pool_warps(l.card, kMostWarps<kLanes, kHeads>, kBytes, block_bytes);
  attend_and_combine(l, op, grid, [&](const Parts& parts, const Rope& rope) {
    launch(l, attend_pool_kernel<Format, kLanes, kHeads, kPairs>, dim3(grid.each, p.heads, grid.passes),
           warps * kWarp, warps * kBytes + block_bytes, l.step, l.heads + p.head_state, p, data<float>(op.q),
           data<Unit>(op.k.values), data<Unit>(op.v.values), data<uint32_t>(op.list), rope, parts);
  });
}

template <typename Format, uint32_t kLanes, uint32_t kHeads>
static void attend(const Launch& l, const Attention& op) {
  if (op.p.rope.pairing == kRopeAdjacent)
    attend<Format, kLanes, kHeads, Pairs::kAdjacent>(l, op);
  else
    attend<Format, kLanes, kHeads, Pairs::kHalves>(l, op);
}
template <typename Format, uint32_t kLanes>
static void attend(const Launch& l, const Attention& op) {
  if (op.p.group <= 4)
    attend<Format, kLanes, 4>(l, op);
  else
    attend<Format, kLanes, 8>(l, op);
}

template <typename Format>
static void attend(const Launch& l, const Attention& op) {
  const bool aligned = reinterpret_cast<uintptr_t>(data<float>(op.q)) % 16 == 0,
             any = op.p.rope.n_rot == 0 || op.p.rope.n_rot % 8 != 0 || !aligned;
  if (op.p.head_dim == kWideDim) {
    if (any) return attend_wide<Format, Pairs::kAny>(l, op);
    return op.p.rope.pairing == kRopeAdjacent ? attend_wide<Format, Pairs::kAdjacent>(l, op)
                                              : attend_wide<Format, Pairs::kHalves>(l, op);
  }
  if (any) return attend<Format, 32, kMostPoolHeads, Pairs::kAny>(l, op);
  if (op.p.head_dim <= 64) return attend<Format, 8>(l, op);
  if (op.p.head_dim <= 128) return attend<Format, 16>(l, op);
  attend<Format, 32>(l, op);
}

void attend_pool(const Launch& l, const Attention& op) {
  if (!op.v) return attend_pool_latent(l, op);
  with_format(op.k.type, [&]<typename Format>(Format) { attend<Format>(l, op); });
}

uint64_t attend_pool_scratch(const ModelShape& m, const SessionShape& s, const Card& card) {
  const uint64_t parts = uint64_t(most_pool_blocks(m, card)) * kMostPoolHeads;
  return std::max(parts * (m.head_dim + 2) * sizeof(float), attend_pool_latent_scratch(m, s, card));
}

}  // namespace thimble::cuda
