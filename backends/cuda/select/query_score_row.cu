// query_score of a single row, whose queries are few: keys go by as fast as they can be read. Eight lanes
// share an entry, each takes every eighth pair of its channels.
#include <algorithm>

#include "backends/cuda/select/query_score.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kLanes = 8, kThreads = 128, kWarps = kThreads / kWarp;
constexpr uint32_t kEntries = kQueryScoreTile * kLanes / kThreads;  // of a tile, that a thread works on
constexpr uint32_t kVectors = 4;  // queries at a time: lane v of an entry's lanes answers for query v
static_assert(kVectors <= kLanes);

struct Row : QueryHead {
  float* turned_queries;  // shared, [kVectors][head_dim]
  uint32_t lane = threadIdx.x % kLanes, first_entry = threadIdx.x / kLanes * kEntries;

  __device__ Row(const StepParams& s, const HeadState* heads, const QueryScoreParams& params,
                 const QueryScoreArrays& arrays, float* shared)
      : QueryHead(s, heads, params, arrays), turned_queries(shared) {}

  // Logits of the lane's query, of those from `first` on, and the entries from first_entry on. The lanes
  // behind the queries get nothing of use. All threads must call it.
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
    for (uint32_t pair = lane; pair < p.head_dim / 2; pair += kLanes) {
      const uint2 c = channels(pair);
      float2 x[kEntries];
#pragma unroll
      for (uint32_t e = 0; e < kEntries; ++e) x[e] = {__half2float(keys[e][c.x]), __half2float(keys[e][c.y])};
      if (p.rope.mode == kRopeList && pair < a.rope.pairs) {
#pragma unroll
        for (uint32_t e = 0; e < kEntries; ++e)
          x[e] = turned(x[e], a.rope.table[(first_entry + e) * a.rope.pairs + pair]);
      }
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) {
        const float *q = turned_queries + v * p.head_dim, y0 = q[c.x], y1 = q[c.y];
#pragma unroll
        for (uint32_t e = 0; e < kEntries; ++e) all[e][v] += x[e].x * y0 + x[e].y * y1;
      }
    }
#pragma unroll
    for (uint32_t e = 0; e < kEntries; ++e) {
      logits[e] = 0;
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) {
        float sum = all[e][v];
#pragma unroll
        for (uint32_t apart = 1; apart < kLanes; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        if (lane == v) logits[e] = p.cap != 0 ? soft_cap(sum, p.cap) : sum;
      }
    }
  }

 private:
  // For a tile. Under kRopeList keys turn by their place in the tile, so that 64 rows of the table do for all
  // of them, and queries by what then is missing.
  __device__ void turn_queries(uint32_t tile, uint32_t first) const {
    const bool by_place = p.rope.mode == kRopeList;
    const uint32_t pairs = p.head_dim / 2;
    uint32_t position = query_position(step, span, 0, p.rope.mode);
    if (by_place) position -= min(position, entry_of(span, tile * kQueryScoreTile));
    for (uint32_t i = threadIdx.x; i < kVectors * pairs; i += kThreads) {
      const uint32_t v = i / pairs, pair = i % pairs;
      const uint2 c = channels(pair);
      float2 x{0, 0};
      if (first + v < p.group) x = query(first + v, c);
      if (pair < a.rope.pairs) {
        float2 angle = a.rope.angle(position, pair);
        if (by_place) angle = {angle.x * a.rope.factor(), angle.y * a.rope.factor()};  // a place has none
        x = turned(x, angle);
      }
      turned_queries[v * p.head_dim + c.x] = x.x;
      turned_queries[v * p.head_dim + c.y] = x.y;
    }
  }
};

// Block (sum, KV head): the sums over its tiles.
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const StepParams* step, const HeadState* heads, QueryScoreParams p, QueryScoreArrays arrays) {
  extern __shared__ float shared[];
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
    if (lane < kVectors) of_warps[threadIdx.x / kWarp][lane] = own;
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
  extern __shared__ float shared[];
  const StepParams s = begin_kernel(step);
  const Row row(s, heads, p, arrays, shared);
  for (uint32_t tile = blockIdx.x; tile < query_tiles(row.span); tile += gridDim.x) {
    float scores[kEntries] = {};
    for (uint32_t first = 0; first < p.group; first += kVectors) {
      float logits[kEntries];
      row.multiply(tile, first, logits);
      if (row.lane >= kVectors || first + row.lane >= p.group) continue;
      const float sum = *row.sums(first + row.lane);
#pragma unroll
      for (uint32_t e = 0; e < kEntries; ++e) {
        const float log_weight = logits[e] - sum;
        if (log_weight > -kInfinity) scores[e] += expf(log_weight);
      }
    }
#pragma unroll
    for (uint32_t e = 0; e < kEntries; ++e) {
#pragma unroll
      for (uint32_t apart = 1; apart < kVectors; apart *= 2)
        scores[e] += __shfl_xor_sync(~0u, scores[e], apart);
      const uint32_t i = tile * kQueryScoreTile + row.first_entry + e;
      if (row.lane == 0 && i < row.span.count) row.score(i) = scores[e];
    }
  }
}

uint32_t shared_bytes(const QueryScoreParams& p) { return kVectors * p.head_dim * sizeof(float); }

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
