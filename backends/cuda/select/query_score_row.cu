// query_score of a single row, whose queries are few: keys go by as fast as they can be read. Eight lanes
// share an entry, each takes every eighth quad of its channels: pairs 2i and 2i + 1.
#include <algorithm>

#include "backends/cuda/select/query_score.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kLanes = 8, kThreads = 128, kWarps = kThreads / kWarp;
constexpr uint32_t kEntries = kQueryScoreTile * kLanes / kThreads;  // of a tile, that a thread works on
constexpr uint32_t kVectors = 4;  // queries at a time: lanes 2v and 2v + 1 of an entry answer for query v
static_assert(2 * kVectors == kLanes);

__host__ __device__ uint32_t quads(const QueryScoreParams& p) { return (p.head_dim + 3) / 4; }

struct Row : QueryHead {
  float4* turned_queries;  // shared, [kVectors][quads]
  uint32_t lane = threadIdx.x % kLanes, vector = lane / 2, first_entry = threadIdx.x / kLanes * kEntries;
  // Whether no quad is half turned, and channels 2i and 2i + 1 of a key can be read at once.
  bool in_twos = p.head_dim % 4 == 0 && a.rope.pairs % 2 == 0;

  __device__ Row(const StepParams& s, const HeadState* heads, const QueryScoreParams& params,
                 const QueryScoreArrays& arrays, float4* shared)
      : QueryHead(s, heads, params, arrays), turned_queries(shared) {}

  // Logits of query first + vector and the entries from first_entry on. Those of queries behind the last one
  // are of no use. All threads must call it.
  __device__ void multiply(uint32_t tile, uint32_t first, float (&logits)[kEntries]) const {
    __syncthreads();
    turn_queries(tile, first);
    __syncthreads();
    float all[kEntries][kVectors] = {};
    const __half* keys[kEntries];
#pragma unroll
    for (uint32_t e = 0; e < kEntries; ++e)
      keys[e] = key(min(tile * kQueryScoreTile + first_entry + e, span.count - 1));
#pragma unroll 2
    for (uint32_t quad = lane; quad < quads(p); quad += kLanes) {
      float2 x[kEntries][2];
      read(keys, quad, x);
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) {
        const float4 q = turned_queries[v * quads(p) + quad];
#pragma unroll
        for (uint32_t e = 0; e < kEntries; ++e)
          all[e][v] += x[e][0].x * q.x + x[e][0].y * q.y + x[e][1].x * q.z + x[e][1].y * q.w;
      }
    }
#pragma unroll
    for (uint32_t e = 0; e < kEntries; ++e) {
      const float sum = sum_of_lanes(all[e]);
      logits[e] = p.cap != 0 ? soft_cap(sum, p.cap) : sum;
    }
  }

 private:
  // For a tile. Under kRopeList keys turn by their place in the tile, so that 64 rows of the table do for all
  // of them, and queries by what then is missing.
  __device__ void turn_queries(uint32_t tile, uint32_t first) const {
    const bool by_place = p.rope.mode == kRopeList;
    const uint32_t pairs = 2 * quads(p);
    uint32_t position = query_position(step, span, 0, p.rope.mode);
    if (by_place) position -= min(position, entry_of(span, tile * kQueryScoreTile));
    for (uint32_t i = threadIdx.x; i < kVectors * pairs; i += kThreads) {
      const uint32_t v = i / pairs, pair = i % pairs;
      float2 x{0, 0};
      if (first + v < p.group && pair < p.head_dim / 2) x = query(first + v, channels(pair));
      if (pair < a.rope.pairs) {
        float2 angle = a.rope.angle(position, pair);
        if (by_place) angle = {angle.x * a.rope.factor(), angle.y * a.rope.factor()};  // a place has none
        x = turned(x, angle);
      }
      reinterpret_cast<float2*>(turned_queries)[i] = x;
    }
  }

  // The two pairs of a quad of the keys, turned.
  __device__ void read(const __half* const (&keys)[kEntries], uint32_t quad, float2 (&x)[kEntries][2]) const {
    if (in_twos) {
      const bool apart = p.rope.pairing != kRopeAdjacent && 2 * quad < a.rope.pairs;
      const uint32_t first = apart ? 2 * quad : 4 * quad, second = first + (apart ? a.rope.pairs : 2);
#pragma unroll
      for (uint32_t e = 0; e < kEntries; ++e) {
        x[e][0] = __half22float2(*reinterpret_cast<const __half2*>(keys[e] + first));
        x[e][1] = __half22float2(*reinterpret_cast<const __half2*>(keys[e] + second));
      }
#pragma unroll
      for (uint32_t e = 0; e < kEntries; ++e) {
        const float2 low = x[e][0], high = x[e][1];
        if (apart) x[e][0] = {low.x, high.x}, x[e][1] = {low.y, high.y};
      }
    } else {
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        // Behind the last pair is that one again, which meets zeros.
        const uint2 c = channels(min(2 * quad + k, p.head_dim / 2 - 1));
#pragma unroll
        for (uint32_t e = 0; e < kEntries; ++e)
          x[e][k] = {__half2float(keys[e][c.x]), __half2float(keys[e][c.y])};
      }
    }
    if (p.rope.mode != kRopeList) return;
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
      const uint32_t pair = 2 * quad + k;
      if (pair >= a.rope.pairs) break;
#pragma unroll
      for (uint32_t e = 0; e < kEntries; ++e)
        x[e][k] = turned(x[e][k], a.rope.table[(first_entry + e) * a.rope.pairs + pair]);
    }
  }

  // Of the four sums the one of the lane's query, over the entry's lanes: at each of two exchanges a lane
  // gives away those that it does not answer for.
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

// Block (sum, KV head): the sums over its tiles.
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const StepParams* step, const HeadState* heads, QueryScoreParams p, QueryScoreArrays arrays) {
  extern __shared__ float4 shared[];
  __shared__ LogSum of_warps[kWarps][kVectors];
  const StepParams s = begin_kernel(step);
  const Row row(s, heads, p, arrays, shared);
  const uint32_t each = tiles_of_sum(row.span), begin = blockIdx.x * each,
                 end = min(begin + each, query_tiles(row.span));
  if (begin >= end) return;
  for (uint32_t first = 0; first < p.group; first += kVectors) {
    LogSum own = kNoSum;
    for (uint32_t tile = begin; tile < end; ++tile) {
      float logits[kEntries];
      row.multiply(tile, first, logits);
      const uint32_t at = tile * kQueryScoreTile + row.first_entry;
#pragma unroll
      for (uint32_t e = 0; e < kEntries; ++e)
        if (at + e >= row.span.count) logits[e] = -kInfinity;
      add(own, log_sum(logits));
    }
    own = warp_log_sum(own, kLanes);
    const uint32_t lane = threadIdx.x % kWarp;
    if (lane < kLanes && lane % 2 == 0) of_warps[threadIdx.x / kWarp][row.vector] = own;
    __syncthreads();
    if (threadIdx.x >= kVectors || first + threadIdx.x >= p.group) continue;
    LogSum sum = kNoSum;
    for (uint32_t warp = 0; warp < kWarps; ++warp)
      if (of_warps[warp][threadIdx.x].sum > 0) add(sum, of_warps[warp][threadIdx.x]);
    row.sums(first + threadIdx.x)[blockIdx.x] = log_of(sum);
  }
}

// The entries of tiles blockIdx.x, + gridDim.x, ... of KV head blockIdx.y: the sum of their weights.
__global__ void __launch_bounds__(kThreads) score_kernel(const StepParams* step, const HeadState* heads,
                                                         QueryScoreParams p, QueryScoreArrays arrays) {
  extern __shared__ float4 shared[];
  const StepParams s = begin_kernel(step);
  const Row row(s, heads, p, arrays, shared);
  for (uint32_t tile = blockIdx.x; tile < query_tiles(row.span); tile += gridDim.x) {
    float scores[kEntries] = {};
    for (uint32_t first = 0; first < p.group; first += kVectors) {
      float logits[kEntries];
      row.multiply(tile, first, logits);
      if (first + row.vector >= p.group) continue;
      const float sum = *row.sums(first + row.vector);
#pragma unroll
      for (uint32_t e = 0; e < kEntries; ++e) {
        const float log_weight = logits[e] - sum;
        if (log_weight > -kInfinity) scores[e] += expf(log_weight);
      }
    }
#pragma unroll
    for (uint32_t e = 0; e < kEntries; ++e) {
#pragma unroll
      for (uint32_t apart = 2; apart < kLanes; apart *= 2)
        scores[e] += __shfl_xor_sync(~0u, scores[e], apart);
      const uint32_t i = tile * kQueryScoreTile + row.first_entry + e;
      if (row.lane == 0 && i < row.span.count) row.score(i) = scores[e];
    }
  }
}

uint32_t shared_bytes(const QueryScoreParams& p) { return kVectors * quads(p) * sizeof(float4); }

}  // namespace

void sum_weights_of_row(const Launch& l, const QueryScore& op, const QueryScoreArrays& arrays) {
  launch(l, sum_kernel, dim3(kQueryScoreSums, op.p.heads), kThreads, shared_bytes(op.p), l.step,
         l.heads + op.p.head_state, op.p, arrays);
}

void score_by_row(const Launch& l, const QueryScore& op, const QueryScoreArrays& arrays, uint32_t tiles) {
  launch(l, score_kernel, dim3(tiles, op.p.heads), kThreads, shared_bytes(op.p), l.step,
         l.heads + op.p.head_state, op.p, arrays);
}

}  // namespace thimble::cuda
