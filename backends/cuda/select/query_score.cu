// query_score: how much attention weight queries give to entries. One kernel computes sums of weights, one
// merges those of a query, one scores; kQueryLast needs a fourth for the mean over heads. The first and the
// third kernel for several rows are in this file, those for a single row in query_score_row.cu.
#include <algorithm>

#include "backends/cuda/select/query_score.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 128, kWarps = kThreads / kWarp;
// Queries at a time, in total and per warp. A lane processes entries `lane` and `lane` + 32 of a tile.
constexpr uint32_t kVectors = 16, kOfWarp = kVectors / kWarps;
// Stride between channels, chosen so that lanes use different banks
constexpr uint32_t kKeyStride = kQueryScoreTile + 1;
static_assert(kQueryScoreTile == 2 * kWarp);
// The pairs of channels of a slice. Heads of up to 256 channels are one slice.
constexpr uint32_t kWidePairs = 96;
__host__ __device__ constexpr uint32_t slice_pairs(uint32_t head_dim) {
  return head_dim <= kMostNarrowHeadDim ? head_dim / 2 : kWidePairs;
}

// The queries and entries of one KV head for several rows, and the block's shared memory, which holds a slice
// of their channels at a time.
template <typename Format>
struct Rows : QueryHead {
  uint32_t pairs, slice;  // of a head, and of a slice
  float* queries;         // [kVectors][2 * slice]
  float* keys;            // [2 * slice][kKeyStride]

  __device__ Rows(const StepParams& s, const HeadState* heads, const QueryScoreParams& params,
                  const QueryScoreArrays& arrays, float* shared)
      : QueryHead(s, heads, params, arrays),
        pairs(p.head_dim / 2),
        slice(slice_pairs(p.head_dim)),
        queries(shared),
        keys(shared + kVectors * 2 * slice) {}

  // Calls each(vector, logits) for the warp's vectors and the keys of a tile; the lane has two entries.
  template <typename Each>
  __device__ void each_vector(uint32_t tile, const Each& each) const {
    for (uint32_t first = 0; first < vectors(); first += kVectors) {
      float logits[kOfWarp][2] = {};
      for (uint32_t from = 0; from < pairs; from += slice) {
        __syncthreads();
        if (first == 0 || slice < pairs) read_keys(tile, from);
        read_queries(first, from);
        __syncthreads();
        multiply(min(slice, pairs - from), logits);
      }
      if (p.cap != 0)
#pragma unroll
        for (uint32_t j = 0; j < kOfWarp; ++j)
          for (float& logit : logits[j]) logit = soft_cap(logit, p.cap);
      for (uint32_t j = 0; j < kOfWarp; ++j) {
        const uint32_t vector = first + threadIdx.x / kWarp + j * kWarps;
        if (vector >= vectors()) break;
        each(vector, logits[j]);
      }
    }
  }

 private:
  // Where the channels `c` of pair `pair` are stored of a slice from pair `from` on.
  __device__ uint2 places(uint2 c, uint32_t pair, uint32_t from) const {
    return slice == pairs ? c : uint2{2 * (pair - from), 2 * (pair - from) + 1};
  }

  // Loads the rotated keys of a tile, with zeros after the span.
  __device__ void read_keys(uint32_t tile, uint32_t from) const {
    const uint32_t count = min(slice, pairs - from);
    for (uint32_t i = threadIdx.x; i < kQueryScoreTile * count; i += kThreads) {
      const uint32_t number = i / count, pair = from + i % count, index = tile * kQueryScoreTile + number;
      const uint2 c = channels(pair), to = places(c, pair, from);
      float2 x{0, 0};
      if (index < span.count) {
        x = {Format::load(key<Format>(index), p.head_dim, c.x),
             Format::load(key<Format>(index), p.head_dim, c.y)};
        if (p.rope.mode == kRopeList && pair < a.rope.pairs)
          x = turned(x, a.rope.angle(entry_of(span, index), pair));
      }
      keys[to.x * kKeyStride + number] = x.x;
      keys[to.y * kKeyStride + number] = x.y;
    }
  }

  // Loads rotated and scaled queries from vector `first` on, with zeros after the last.
  __device__ void read_queries(uint32_t first, uint32_t from) const {
    const uint32_t count = min(slice, pairs - from);
    for (uint32_t i = threadIdx.x; i < kVectors * count; i += kThreads) {
      const uint32_t v = i / count, pair = from + i % count, vector = first + v;
      const uint2 c = channels(pair), to = places(c, pair, from);
      float2 x{0, 0};
      if (vector < vectors()) {
        x = query(vector, c);
        const uint32_t position = query_position(step, span, vector / p.group, p.rope.mode);
        if (pair < a.rope.pairs) x = turned(x, a.rope.angle(position, pair));
      }
      queries[v * 2 * slice + to.x] = x.x;
      queries[v * 2 * slice + to.y] = x.y;
    }
  }

  // Adds the products of `count` pairs to the logits of the lane's entries for the warp's queries: warp, warp
  // + kWarps, ... of those loaded.
  __device__ void multiply(uint32_t count, float (&logits)[kOfWarp][2]) const {
    const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll 4
    for (uint32_t c = 0; c < 2 * count; ++c) {
      const float key = keys[c * kKeyStride + lane], other = keys[c * kKeyStride + lane + kWarp];
#pragma unroll
      for (uint32_t j = 0; j < kOfWarp; ++j) {
        const float x = queries[(warp + j * kWarps) * 2 * slice + c];
        logits[j][0] += x * key;
        logits[j][1] += x * other;
      }
    }
  }
};

uint32_t shared_bytes(uint32_t head_dim) {
  return (kVectors + kKeyStride) * 2 * slice_pairs(head_dim) * sizeof(float);
}

// Grid: (sum, KV head). Computes the sums over the block's tiles.
template <typename Format>
__global__ void __launch_bounds__(kThreads)
    sum_weights(const StepParams* step, const HeadState* heads, QueryScoreParams p, QueryScoreArrays arrays) {
  extern __shared__ float shared[];
  const StepParams s = begin_kernel(step);
  const Rows<Format> rows(s, heads, p, arrays, shared);
  const QuerySpan& span = rows.span;
  const uint32_t each = tiles_of_sum(span), begin = blockIdx.x * each,
                 end = min(begin + each, query_tiles(span));
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t tile = begin; tile < end; ++tile) {
    rows.each_vector(tile, [&](uint32_t vector, const float(&logits)[2]) {
      const uint32_t seen = entries_seen(span, vector / p.group), at = tile * kQueryScoreTile + lane;
      LogSum own = kNoSum;
      if (at < seen) add(own, logits[0]);
      if (at + kWarp < seen) add(own, logits[1]);
      own = warp_log_sum(own);
      if (lane != 0) return;
      float& sum = rows.sums(vector)[blockIdx.x];
      LogSum all = tile == begin ? kNoSum : LogSum{sum, 1};
      if (own.sum > 0) add(all, own);
      sum = log_of(all);
    });
  }
}

// One warp per vector. Grid: (vectors, KV head).
__global__ void __launch_bounds__(kThreads)
    merge_sums(const StepParams* step, const HeadState* heads, QueryScoreParams p, QueryScoreArrays arrays,
               const float* sinks) {
  const StepParams s = begin_kernel(step);
  const QueryHead head(s, heads, p, arrays);
  const uint32_t vector = blockIdx.x * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (head.span.count == 0 || vector >= head.vectors()) return;
  const uint32_t count = units(query_tiles(head.span), tiles_of_sum(head.span));
  LogSum sum = kNoSum;
  for (uint32_t i = lane; i < count; i += kWarp) add(sum, head.sums(vector)[i]);
  sum = warp_log_sum(sum);
  if (lane != 0) return;
  LogSum all = kNoSum;
  if (sum.sum > 0) add(all, sum);
  if (sinks) add(all, sinks[head.head * p.group + vector % p.group]);
  *head.sums(vector) = log_of(all);
}

// Scores the entries of tiles blockIdx.x, + gridDim.x, ... of KV head blockIdx.y by the largest logarithm of
// a weight.
template <typename Format>
__global__ void __launch_bounds__(kThreads) score_entries(const StepParams* step, const HeadState* heads,
                                                          QueryScoreParams p, QueryScoreArrays arrays) {
  extern __shared__ float shared[];
  __shared__ float of_warps[kWarps][kQueryScoreTile];
  const StepParams s = begin_kernel(step);
  const Rows<Format> rows(s, heads, p, arrays, shared);
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp,
                 end = rows.span.sinks + rows.span.scored;
  for (uint32_t tile = blockIdx.x; tile * kQueryScoreTile < end; tile += gridDim.x) {
    float scores[2] = {-kInfinity, -kInfinity};
    __syncthreads();  // of_warps is no longer read
    rows.each_vector(tile, [&](uint32_t vector, const float(&logits)[2]) {
      const float sum = *rows.sums(vector);
      for (uint32_t i = 0; i < 2; ++i) {
        const float log_weight = logits[i] - sum;
        if (log_weight > -kInfinity) scores[i] = fmaxf(scores[i], log_weight);
      }
    });
    for (uint32_t i = 0; i < 2; ++i) of_warps[warp][lane + i * kWarp] = scores[i];
    __syncthreads();
    const uint32_t i = threadIdx.x, index = tile * kQueryScoreTile + i;
    if (i >= kQueryScoreTile || index < rows.span.sinks || index >= end) continue;
    float score = -kInfinity;
    for (uint32_t from = 0; from < kWarps; ++from) score = fmaxf(score, of_warps[from][i]);
    rows.score(index) = score;
  }
}

// Replaces the scores of all heads by their mean; the last entry is always kept.
__global__ void __launch_bounds__(kThreads) share_mean(const StepParams* step, const HeadState* heads,
                                                       QueryScoreParams p, float* cis, float* chunk_cis) {
  const StepParams s = begin_kernel(step);
  const uint32_t pooled = heads[0].n_entries, n = step_entries(s, heads[0]);
  for (uint32_t entry = blockIdx.x * kThreads + threadIdx.x; entry < n; entry += gridDim.x * kThreads) {
    const auto score = [&](uint32_t head) -> float& {
      return entry < pooled ? cis[uint64_t(heads[head].first) + entry]
                            : chunk_cis[uint64_t(head) * p.chunk_capacity + entry - pooled];
    };
    float sum = 0;
    for (uint32_t head = 0; head < p.heads; ++head) sum += score(head);
    const float mean = entry + 1 == n ? kInfinity : sum / static_cast<float>(p.heads * p.group);
    for (uint32_t head = 0; head < p.heads; ++head) score(head) = mean;
  }
}

}  // namespace

void query_score(const Launch& l, const QueryScore& op) {
  const QueryScoreParams& p = op.p;
  const HeadState* heads = l.heads + p.head_state;
  const QueryScoreArrays arrays{.q = data<float>(op.q),
                                .k = data<void>(op.k.values),
                                .chunk_k = data<void>(op.chunk_k.values),
                                .lists = data<uint32_t>(op.list),
                                .rope = {data<float2>(op.rope), p.rope.n_rot / 2},
                                .sums = data<float>(op.sums),
                                .cis = data<float>(op.cis),
                                .chunk_cis = data<float>(op.chunk_cis)};
  const bool rows = p.kind == kQueryRows;
  const uint32_t shared = shared_bytes(p.head_dim), vectors = p.rows * p.group;
  // A head's run has space for this many entries on average. The scored entries of a chunk begin after the
  // sinks.
  const uint64_t room = op.k.values.bytes / kv_bytes(op.k.type, p.head_dim) / (p.first_head + p.heads);
  const uint64_t entries = (rows ? p.sinks : room) + l.max_rows;
  const uint32_t tiles = static_cast<uint32_t>(ceil_div(entries, kQueryScoreTile));
  if (rows)
    with_format(op.k.type, [&]<typename Format>(Format) {
      launch(l, sum_weights<Format>, dim3(kQueryScoreSums, p.heads), kThreads, shared, l.step, heads, p,
             arrays);
    });
  else
    sum_weights_of_row(l, op, arrays);
  launch(l, merge_sums, dim3(static_cast<uint32_t>(ceil_div(vectors, kWarps)), p.heads), kThreads, 0, l.step,
         heads, p, arrays, data<float>(op.sinks));
  if (rows)
    with_format(op.k.type, [&]<typename Format>(Format) {
      launch(l, score_entries<Format>, dim3(tiles, p.heads), kThreads, shared, l.step, heads, p, arrays);
    });
  else
    score_by_row(l, op, arrays, tiles);
  if (p.kind == kQueryLast)
    launch(l, share_mean, static_cast<uint32_t>(ceil_div(entries, kThreads)), kThreads, 0, l.step, heads, p,
           arrays.cis, arrays.chunk_cis);
}

}  // namespace thimble::cuda
