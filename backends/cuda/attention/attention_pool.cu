// attention of a single row to the pool. Each warp attends to a share of the list with a running maximum and
// sum, a block combines its warps, and a second kernel combines the blocks of a head. With a short list the
// kernel is a chain of waits, so it loads as early as possible.
#include "backends/cuda/attention/pool_parts.cuh"
#include "backends/cuda/attention/pool_rows.cuh"
#include "backends/cuda/rope.cuh"
#include "backends/cuda/soft_cap.cuh"

namespace thimble::cuda {

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
  __device__ void load(const typename Format::Unit* row, uint32_t head_dim, float (&a)[4],
                       float (&b)[4]) const {
    if constexpr (kPairs == Pairs::kAny) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        a[i] = Format::load(row, head_dim, x(i));
        b[i] = Format::load(row, head_dim, y(i));
      }
      return;
    }
    float channels[8];
    if constexpr (kPairs == Pairs::kAdjacent) {
      Format::load_eight(row, head_dim, first / 4, channels);
    } else {
      Format::load_four(row, head_dim, x(0), channels);
      Format::load_four(row, head_dim, y(0), channels + 4);
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
      pairs.template load<Format>(reinterpret_cast<const typename Format::Unit*>(stream.row(0, row)),
                                  p.head_dim, x, y);
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

// Heads of 512 channels, and any heads of other formats than plain ones. A lane has kChunks chunks of a row:
// chunk `lane`, and for 512 channels chunk `lane` + 32. A warp loads two rows at a time straight into
// registers: of wide rows, the stages of a ring would take too much shared memory.
constexpr uint32_t kWideDim = 512, kWideHeads = 4, kWideWarps = 8, kWideRows = 2;

template <typename Keys, typename Values, Pairs kPairs, uint32_t kChunks>
static __global__ void __launch_bounds__(kWideWarps* kWarp, 1)
    attend_pool_wide_kernel(const StepParams* step, const HeadState* table, AttentionParams p, const float* q,
                            const typename Keys::Unit* k, const typename Values::Unit* v,
                            const uint32_t* lists, Rope rope, Parts parts) {
  extern __shared__ float4 outs[];  // [warps][kWideHeads][head_dim / 4]
  __shared__ float2 peaks_and_sums[kWideWarps][kWideHeads];
  const uint32_t head_dim = kChunks == 2 ? kWideDim : p.head_dim;
  const StepParams s = begin_kernel(step);
  const HeadBlocks own_blocks = blocks_around(Attended(s, table, p, lists != nullptr));
  if (own_blocks.head == p.heads) return;  // a surplus block
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t head = p.first_head + own_blocks.head, first_head = blockIdx.z * kWideHeads;
  const uint32_t heads = min(kWideHeads, p.group - first_head);
  const float* const own_queries = q + (head * p.group + first_head) * head_dim;
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
  const auto entry_of = [&](uint32_t i) { return run + list[min(i, end - 1)]; };
  const bool has_channels = kChunks == 2 || lane * 8 < head_dim;

  const bool by_list = p.rope.mode == kRopeList;
  const float factor = by_list && rope.pairs ? rope.factor() : 1;
  const LanePairs<kPairs> pairs[2] = {{4 * lane, rope.pairs, p.rope.pairing},
                                      {4 * (lane + kWarp), rope.pairs, p.rope.pairing}};
  const KeyTurn<kPairs> turns[2] = {{pairs[0], rope.table, by_list}, {pairs[1], rope.table, by_list}};
  float query[kWideHeads][kChunks][8];  // the lane's pairs: four first channels, four second channels
  const auto rotate_queries = [&](uint32_t position) {
#pragma unroll
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
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
        if (h < heads && has_channels) pairs[chunk].load(own_queries + h * head_dim, x, y);
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
  float peak = -kInfinity, sum = 0, out[kWideHeads][kChunks][8] = {};
#pragma unroll 1
  for (uint32_t start = first; start < end; start += kWideRows) {
    if (start == first || (by_list && start % kTile == 0))
      rotate_queries(by_list ? list.count - 1 - (start - start % kTile) : static_cast<uint32_t>(s.position));
    float scores[kWideRows * kWideHeads] = {};
#pragma unroll
    for (uint32_t r = 0; r < kWideRows; ++r) {
      const auto* const key = k + entry_of(start + r) * Keys::row_units(head_dim);
#pragma unroll
      for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
        float x[4] = {}, y[4] = {};
        if (has_channels) pairs[chunk].template load<Keys>(key, head_dim, x, y);
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
        for (uint32_t i = 0; i < 8 * kChunks; ++i) out[h][i / 8][i % 8] *= of_head;
      }
    }
    const float weight = exp2f(score - peak);
    sum += weight;
#pragma unroll
    for (uint32_t r = 0; r < kWideRows; ++r) {
      const auto* const row = v + entry_of(start + r) * Values::row_units(head_dim);
      float weights[kWideHeads];
#pragma unroll
      for (uint32_t h = 0; h < kWideHeads; ++h) weights[h] = __shfl_sync(~0u, weight, r * kWideHeads + h);
#pragma unroll
      for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
        float value[8] = {};
        if (has_channels) Values::load_eight(row, head_dim, lane + chunk * kWarp, value);
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
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      if (!has_channels) continue;
      float4* const to = outs + (warp * kWideHeads + h) * (head_dim / 4) + (lane + chunk * kWarp) * 2;
      const float(&from)[8] = out[h][chunk];
      to[0] = {from[0], from[1], from[2], from[3]};
      to[1] = {from[4], from[5], from[6], from[7]};
    }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < heads * (head_dim / 4); i += kWideWarps * kWarp) {
    const uint32_t h = i / (head_dim / 4), four = i % (head_dim / 4);
    float2 of_warp[kWideWarps];
#pragma unroll
    for (uint32_t w = 0; w < kWideWarps; ++w) of_warp[w] = peaks_and_sums[w][h];
    float factors[kWideWarps];
    const float2 of_all = weigh(of_warp, factors);
    float4 total{0, 0, 0, 0};
#pragma unroll
    for (uint32_t w = 0; w < kWideWarps; ++w) {
      if (factors[w] == 0) continue;
      const float4 x = outs[(w * kWideHeads + h) * (head_dim / 4) + four];
      total = {total.x + x.x * factors[w], total.y + x.y * factors[w], total.z + x.z * factors[w],
               total.w + x.w * factors[w]};
    }
    const uint64_t part =
        Parts::first(own_blocks, p.group, first_head + h) + block_of_heads() - own_blocks.first;
    reinterpret_cast<float4*>(parts.out + part * head_dim)[four] = total;
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

void combine_parts(const Launch& l, const Attention& op, const PoolGrid& grid, const Parts& parts) {
  const AttentionParams& p = op.p;
  const uint32_t queries = p.heads * p.group;
  launch(l, combine_parts_kernel, queries, static_cast<uint32_t>(round_up(p.head_dim, kWarp)), 0, l.step,
         l.heads + p.head_state, p, bool(op.list), grid.each, parts,
         op.sinks ? data<float>(op.sinks) + p.first_head * p.group : nullptr,
         data<float>(op.y) + p.first_head * p.group * p.head_dim);
}

template <typename Keys, typename Values, Pairs kPairs, uint32_t kChunks>
static void attend_wide(const Launch& l, const Attention& op) {
  const AttentionParams& p = op.p;
  const uint32_t bytes = kWideWarps * kWideHeads * p.head_dim * sizeof(float);
  const PoolGrid grid = pool_grid(l.card, p.heads, p.group, kWideHeads);
  attend_and_combine(l, op, grid, [&](const Parts& parts, const Rope& rope) {
    launch(l, attend_pool_wide_kernel<Keys, Values, kPairs, kChunks>, dim3(grid.each, p.heads, grid.passes),
           kWideWarps * kWarp, bytes, l.step, l.heads + p.head_state, p, data<float>(op.q),
           data<typename Keys::Unit>(op.k.values), data<typename Values::Unit>(op.v.values),
           data<uint32_t>(op.list), rope, parts);
  });
}
template <typename Keys, typename Values, Pairs kPairs>
static void attend_wide(const Launch& l, const Attention& op) {
  if (op.p.head_dim == kWideDim)
    attend_wide<Keys, Values, kPairs, 2>(l, op);
  else if constexpr (!Keys::kPlain || !Values::kPlain)
    attend_wide<Keys, Values, kPairs, 1>(l, op);
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

// Whether the pairs of a lane must be found one by one.
static bool has_any_pairs(const Attention& op) {
  const bool aligned = reinterpret_cast<uintptr_t>(data<float>(op.q)) % 16 == 0;
  return op.p.rope.n_rot == 0 || op.p.rope.n_rot % 8 != 0 || !aligned;
}

template <typename Keys, typename Values>
static void attend_wide(const Launch& l, const Attention& op) {
  if (has_any_pairs(op)) return attend_wide<Keys, Values, Pairs::kAny>(l, op);
  return op.p.rope.pairing == kRopeAdjacent ? attend_wide<Keys, Values, Pairs::kAdjacent>(l, op)
                                            : attend_wide<Keys, Values, Pairs::kHalves>(l, op);
}

template <typename Format>
static void attend(const Launch& l, const Attention& op) {
  if (op.p.head_dim == kWideDim) return attend_wide<Format, Format>(l, op);
  if (has_any_pairs(op)) return attend<Format, 32, kMostPoolHeads, Pairs::kAny>(l, op);
  if (op.p.head_dim <= 64) return attend<Format, 8>(l, op);
  if (op.p.head_dim <= 128) return attend<Format, 16>(l, op);
  attend<Format, 32>(l, op);
}

void attend_pool(const Launch& l, const Attention& op) {
  if (!op.v) return attend_pool_latent(l, op);
  with_formats(op.k.type, op.v.type, [&]<typename Keys, typename Values>(Keys, Values) {
    if constexpr (Keys::kPlain && Values::kPlain)
      attend<Keys>(l, op);
    else if (!attend_runs(l, op) && !attend_blocks(l, op))
      attend_wide<Keys, Values>(l, op);
  });
}

uint64_t attend_pool_scratch(const ModelShape& m, const SessionShape& s, const Card& card) {
  const uint64_t parts = uint64_t(most_pool_blocks(m, card)) * kMostPoolHeads;
  return std::max(parts * (m.head_dim + 2) * sizeof(float), attend_pool_latent_scratch(m, s, card));
}

}  // namespace thimble::cuda
