// query_score of a single row. It has few queries, so keys pass by as fast as they can be read. Each warp has
// its own tile and rotates the queries for it, so that no warp waits for another. Eight lanes share an entry;
// each processes every eighth unit of its channels. A unit is four pairs, read at once, or one pair if the
// head's width is not a multiple of that.
#include "backends/cuda/select/query_score.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kLanes = 8, kThreads = 128, kWarps = kThreads / kWarp;
constexpr uint32_t kEntries = 4;                        // per lane at a time
constexpr uint32_t kRound = kWarp / kLanes * kEntries;  // entries per warp
static_assert(kQueryScoreTile % kRound == 0);
// queries at a time; lanes 2v and 2v + 1 of an entry produce the result for query v
constexpr uint32_t kVectors = 4;
static_assert(2 * kVectors == kLanes);

// A unit of a query, a key or the rotary table.
template <uint32_t kPairs>
struct alignas(kPairs == 1 ? 8 : 16) Unit {
  float2 x[kPairs];
};

template <typename Format, uint32_t kPairs>
struct Row : QueryHead {
  using Unit = cuda::Unit<kPairs>;
  uint32_t units = p.head_dim / 2 / kPairs, lane = threadIdx.x % kLanes, vector = lane / 2;
  uint32_t first_entry = threadIdx.x % kWarp / kLanes * kEntries;  // in a round
  // The warp's own, in shared memory: [kVectors][units]
  Unit* queries;

  __device__ Row(const StepParams& s, const HeadState* heads, const QueryScoreParams& params,
                 const QueryScoreArrays& arrays, float4* shared)
      : QueryHead(s, heads, params, arrays),
        queries(reinterpret_cast<Unit*>(shared) + threadIdx.x / kWarp * kVectors * units) {}

  // Calls each(i, logits) for the rounds of a tile: logits of query first + vector and entries i, i + 1, ...
  // of the span. Logits of queries after the last one, and of entries after the span, must not be used.
  template <typename Each>
  __device__ void each_round(uint32_t tile, uint32_t first, const Each& each) const {
    turn_queries(tile, first);
    const uint32_t begin = tile * kQueryScoreTile, end = min(begin + kQueryScoreTile, span.count);
#pragma unroll 1
    for (uint32_t i = begin; i < end; i += kRound) {
      float logits[kEntries];
      multiply(i + first_entry, i + first_entry - begin, logits);
      each(i + first_entry, logits);
    }
  }

 private:
  // Under kRopeList, keys rotate by their index in the tile, so 64 rows of the table suffice for all of them,
  // and queries rotate by the remaining difference.
  __device__ void turn_queries(uint32_t tile, uint32_t first) const {
    const bool by_place = p.rope.mode == kRopeList;
    const uint32_t pairs = p.head_dim / 2;
    uint32_t position = query_position(step, span, 0, p.rope.mode);
    if (by_place) position -= min(position, entry_of(span, tile * kQueryScoreTile));
    __syncwarp();
    for (uint32_t i = threadIdx.x % kWarp; i < kVectors * pairs; i += kWarp) {
      const uint32_t v = i / pairs, pair = i % pairs;
      float2 x{0, 0};
      if (first + v < p.group) x = query(first + v, channels(pair));
      if (pair < a.rope.pairs) {
        float2 angle = a.rope.angle(position, pair);
        // The low half of the table lacks the factor
        if (by_place) angle = {angle.x * a.rope.factor(), angle.y * a.rope.factor()};
        x = turned(x, angle);
      }
      reinterpret_cast<float2*>(queries)[i] = x;
    }
    __syncwarp();
  }

  // Products of the lane's query and entries i, i + 1, ...; `place`: the index of i in the tile.
  __device__ void multiply(uint32_t i, uint32_t place, float (&logits)[kEntries]) const {
    float all[kEntries][kVectors] = {};
    const typename Format::Unit* keys[kEntries];
#pragma unroll
    for (uint32_t e = 0; e < kEntries; ++e) keys[e] = key<Format>(min(i + e, span.count - 1));
#pragma unroll 2
    for (uint32_t unit = lane; unit < units; unit += kLanes) {
      Unit of[kEntries];
#pragma unroll
      for (uint32_t e = 0; e < kEntries; ++e) of[e] = unit_of(keys[e], unit);
      if (p.rope.mode == kRopeList && unit * kPairs < a.rope.pairs) {
#pragma unroll
        for (uint32_t e = 0; e < kEntries; ++e) {
          const Unit angles = reinterpret_cast<const Unit*>(a.rope.table + (place + e) * a.rope.pairs)[unit];
#pragma unroll
          for (uint32_t k = 0; k < kPairs; ++k) of[e].x[k] = turned(of[e].x[k], angles.x[k]);
        }
      }
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) {
        const Unit q = queries[v * units + unit];
#pragma unroll
        for (uint32_t e = 0; e < kEntries; ++e) {
#pragma unroll
          for (uint32_t k = 0; k < kPairs; ++k)
            all[e][v] += of[e].x[k].x * q.x[k].x + of[e].x[k].y * q.x[k].y;
        }
      }
    }
#pragma unroll
    for (uint32_t e = 0; e < kEntries; ++e) {
      const float sum = sum_of_lanes(all[e]);
      logits[e] = p.cap != 0 ? soft_cap(sum, p.cap) : sum;
    }
  }

  __device__ Unit unit_of(const typename Format::Unit* key, uint32_t unit) const {
    if constexpr (kPairs == 1) {
      const uint2 c = channels(unit);
      return {{{Format::load(key, p.head_dim, c.x), Format::load(key, p.head_dim, c.y)}}};
    } else {
      static_assert(kPairs == 4);
      const bool apart = p.rope.pairing != kRopeAdjacent && unit * kPairs < a.rope.pairs;
      const uint32_t first = unit * (apart ? 4 : 8);
      float x[8];
      Format::load_four(key, p.head_dim, first, x);
      Format::load_four(key, p.head_dim, first + (apart ? a.rope.pairs : 4), x + 4);
      if (!apart) return {{{x[0], x[1]}, {x[2], x[3]}, {x[4], x[5]}, {x[6], x[7]}}};
      return {{{x[0], x[4]}, {x[1], x[5]}, {x[2], x[6]}, {x[3], x[7]}}};
    }
  }

  // Of the four sums, the one of the lane's query, added over the entry's lanes. In each of two exchanges a
  // lane passes on the sums whose query it does not handle.
  __device__ float sum_of_lanes(const float (&sums)[kVectors]) const {
    const bool upper = lane & 4, odd = lane & 2;
    float two[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
      two[i] = (upper ? sums[2 + i] : sums[i]) + __shfl_xor_sync(~0u, upper ? sums[i] : sums[2 + i], 4);
    const float one = (odd ? two[1] : two[0]) + __shfl_xor_sync(~0u, odd ? two[0] : two[1], 2);
    return one + __shfl_xor_sync(~0u, one, 1);
  }
};

// Grid: (sum, KV head). Computes the sums over the block's tiles.
template <typename Format, uint32_t kPairs>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const StepParams* step, const HeadState* heads, QueryScoreParams p, QueryScoreArrays arrays) {
  extern __shared__ float4 shared[];
  __shared__ LogSum of_warps[kWarps][kVectors];
  const StepParams s = begin_kernel(step);
  const Row<Format, kPairs> row(s, heads, p, arrays, shared);
  const uint32_t each = tiles_of_sum(row.span), begin = blockIdx.x * each,
                 end = min(begin + each, query_tiles(row.span)), warp = threadIdx.x / kWarp;
  if (begin >= end) return;
  for (uint32_t first = 0; first < p.group; first += kVectors) {
    LogSum own = kNoSum;
    for (uint32_t tile = begin + warp; tile < end; tile += kWarps)
      row.each_round(tile, first, [&](uint32_t i, float(&logits)[kEntries]) {
#pragma unroll
        for (uint32_t e = 0; e < kEntries; ++e)
          if (i + e >= row.span.count) logits[e] = -kInfinity;
        add(own, log_sum(logits));
      });
    own = warp_log_sum(own, kLanes);
    __syncthreads();  // of_warps is no longer read
    if (threadIdx.x % kWarp == 2 * row.vector) of_warps[warp][row.vector] = own;
    __syncthreads();
    if (threadIdx.x < kVectors && first + threadIdx.x < p.group) {
      LogSum sum = kNoSum;
      for (const auto& of_warp : of_warps)
        if (of_warp[threadIdx.x].sum > 0) add(sum, of_warp[threadIdx.x]);
      row.sums(first + threadIdx.x)[blockIdx.x] = log_of(sum);
    }
  }
}

// One warp per tile of KV head blockIdx.y: the sums of its entries' weights.
template <typename Format, uint32_t kPairs>
__global__ void __launch_bounds__(kThreads) score_kernel(const StepParams* step, const HeadState* heads,
                                                         QueryScoreParams p, QueryScoreArrays arrays) {
  extern __shared__ float4 shared[];
  const StepParams s = begin_kernel(step);
  const Row<Format, kPairs> row(s, heads, p, arrays, shared);
  const uint32_t warps = gridDim.x * kWarps;
  for (uint32_t tile = blockIdx.x * kWarps + threadIdx.x / kWarp; tile < query_tiles(row.span);
       tile += warps) {
    for (uint32_t first = 0; first < p.group; first += kVectors) {
      const bool asked = first + row.vector < p.group;
      const float sum = asked ? *row.sums(first + row.vector) : 0;
      row.each_round(tile, first, [&](uint32_t i, const float(&logits)[kEntries]) {
#pragma unroll
        for (uint32_t e = 0; e < kEntries; ++e) {
          const float log_weight = logits[e] - sum;
          float score = asked && log_weight > -kInfinity ? expf(log_weight) : 0;
#pragma unroll
          for (uint32_t apart = 2; apart < kLanes; apart *= 2) score += __shfl_xor_sync(~0u, score, apart);
          if (row.lane != 0 || i + e >= row.span.count) continue;
          if (first != 0) score += row.score(i + e);
          row.score(i + e) = score;
        }
      });
    }
  }
}

uint32_t shared_bytes(const QueryScoreParams& p) { return kWarps * kVectors * p.head_dim * sizeof(float); }

// Whether units of four pairs are aligned, and rotate completely or not at all.
bool in_fours(const QueryScoreParams& p) { return p.head_dim % 8 == 0 && p.rope.n_rot % 8 == 0; }

}  // namespace

void sum_weights_of_row(const Launch& l, const QueryScore& op, const QueryScoreArrays& arrays) {
  with_format(op.k.type, [&]<typename Format>(Format) {
    launch(l, in_fours(op.p) ? sum_kernel<Format, 4> : sum_kernel<Format, 1>,
           dim3(kQueryScoreSums, op.p.heads), kThreads, shared_bytes(op.p), l.step, l.heads + op.p.head_state,
           op.p, arrays);
  });
}

void score_by_row(const Launch& l, const QueryScore& op, const QueryScoreArrays& arrays, uint32_t tiles) {
  with_format(op.k.type, [&]<typename Format>(Format) {
    launch(l, in_fours(op.p) ? score_kernel<Format, 4> : score_kernel<Format, 1>,
           dim3(units(tiles, kWarps), op.p.heads), kThreads, shared_bytes(op.p), l.step,
           l.heads + op.p.head_state, op.p, arrays);
  });
}

}  // namespace thimble::cuda
