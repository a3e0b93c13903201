// query_score: how much weight queries give to entries. One kernel makes sums of weights, one merges those of
// a query, one scores; kQueryLast takes one more for the mean over heads.
#include <algorithm>

#include "backends/cuda/log_sum.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/rope.cuh"
#include "backends/cuda/soft_cap.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 128, kWarps = kThreads / kWarp;
// Queries at a time, and of each warp; a lane takes the entries `lane` and `lane` + 32 of a tile.
constexpr uint32_t kVectors = 16, kOfWarp = kVectors / kWarps;
constexpr uint32_t kKeyStride = kQueryScoreTile + 1;  // from channel to channel: no two lanes meet in a bank
static_assert(kQueryScoreTile == 2 * kWarp);

// A KV head's list {count, entries}; null where there is none.
__device__ const uint32_t* list_of(const QueryScoreParams& p, const uint32_t* lists, uint32_t head) {
  return lists ? lists + uint64_t(head) * p.list_capacity : nullptr;
}
// Entries that a KV head has, or its list.
__device__ uint32_t entries_of(const StepParams& step, const HeadState& own, const uint32_t* list) {
  return list ? list[0] : step_entries(step, own);
}

// One KV head's queries and entries, and the block's shared memory.
struct Work {
  const StepParams& step;
  const HeadState* heads;
  const QueryScoreParams& p;
  const Rope& rope;
  const uint32_t* lists;                          // or null
  float* queries;                                 // [kVectors][head_dim]
  float* keys = queries + kVectors * p.head_dim;  // [head_dim][kKeyStride]
  uint32_t head = p.first_head + blockIdx.y;
  HeadState own = heads[head];
  const uint32_t* list = list_of(p, lists, head);
  QuerySpan span = query_span(step, own, p, entries_of(step, own, list));

  __device__ uint32_t vectors() const { return span.rows * p.group; }
  // Where the sums of a vector begin.
  __device__ uint64_t sums_of(uint32_t vector) const {
    return (uint64_t(head) * p.rows * p.group + vector) * kQueryScoreSums;
  }
  // An entry in [run][width] or [heads][chunk_capacity][width].
  template <typename T>
  __device__ T* at(T* pool, T* chunk, uint32_t entry, uint32_t width) const {
    return entry < own.n_entries
               ? pool + (uint64_t(own.first) + entry) * width
               : chunk + (uint64_t(head) * p.chunk_capacity + entry - own.n_entries) * width;
  }

  // Channels of pair i; behind those that rotate, of any two.
  __device__ uint32_t first_channel(uint32_t i) const {
    return i < rope.pairs ? first_of_pair(i, p.rope.pairing) : 2 * i;
  }
  __device__ uint32_t second_channel(uint32_t i) const {
    return i < rope.pairs ? second_of_pair(i, p.rope.pairing, rope.pairs) : 2 * i + 1;
  }

  // The rotated keys of a tile; behind the span they are 0.
  __device__ void read_keys(const __half* k, const __half* chunk_k, uint32_t tile) const {
    const uint32_t pairs = p.head_dim / 2;
    for (uint32_t i = threadIdx.x; i < kQueryScoreTile * pairs; i += kThreads) {
      const uint32_t number = i / pairs, pair = i % pairs, index = tile * kQueryScoreTile + number;
      const uint32_t first = first_channel(pair), second = second_channel(pair);
      float2 x{0, 0};
      if (index < span.count) {
        const uint32_t position = entry_of(span, index);
        const __half* key = at(k, chunk_k, list ? list[1 + position] : position, p.head_dim);
        x = {__half2float(key[first]), __half2float(key[second])};
        if (p.rope.mode == kRopeList && pair < rope.pairs) x = turned(x, position, pair);
      }
      keys[first * kKeyStride + number] = x.x;
      keys[second * kKeyStride + number] = x.y;
    }
  }

  // each(vector, logits) for the warp's vectors and the keys that were read: the lane has two entries.
  template <typename Each>
  __device__ void each_vector(const float* q, const Each& each) const {
    for (uint32_t first = 0; first < vectors(); first += kVectors) {
      __syncthreads();
      read_queries(q, first);
      __syncthreads();
      float logits[kOfWarp][2];
      multiply(logits);
      for (uint32_t j = 0; j < kOfWarp; ++j) {
        const uint32_t vector = first + threadIdx.x / kWarp + j * kWarps;
        if (vector >= vectors()) break;
        each(vector, logits[j]);
      }
    }
  }

 private:
  // Rotated and scaled queries from vector `first` on; behind the last one they are 0.
  __device__ void read_queries(const float* q, uint32_t first) const {
    const uint32_t pairs = p.head_dim / 2;
    for (uint32_t i = threadIdx.x; i < kVectors * pairs; i += kThreads) {
      const uint32_t v = i / pairs, pair = i % pairs, vector = first + v, row = vector / p.group;
      float2 x{0, 0};
      if (vector < vectors()) {
        const float* from =
            q + uint64_t(row) * p.row_stride + (head * p.group + vector % p.group) * p.head_dim;
        x = {from[first_channel(pair)] * p.scale, from[second_channel(pair)] * p.scale};
        if (pair < rope.pairs) x = turned(x, query_position(step, span, row, p.rope.mode), pair);
      }
      queries[v * p.head_dim + first_channel(pair)] = x.x;
      queries[v * p.head_dim + second_channel(pair)] = x.y;
    }
  }

  // The lane's entries' logits of the warp's queries: warp, warp + kWarps, ... of those that were read.
  __device__ void multiply(float (&logits)[kOfWarp][2]) const {
    const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (uint32_t j = 0; j < kOfWarp; ++j) logits[j][0] = logits[j][1] = 0;
#pragma unroll 4
    for (uint32_t c = 0; c < p.head_dim; ++c) {
      const float key = keys[c * kKeyStride + lane], other = keys[c * kKeyStride + lane + kWarp];
#pragma unroll
      for (uint32_t j = 0; j < kOfWarp; ++j) {
        const float x = queries[(warp + j * kWarps) * p.head_dim + c];
        logits[j][0] += x * key;
        logits[j][1] += x * other;
      }
    }
    if (p.cap == 0) return;
#pragma unroll
    for (uint32_t j = 0; j < kOfWarp; ++j)
      for (float& logit : logits[j]) logit = soft_cap(logit, p.cap);
  }

  __device__ float2 turned(float2 x, uint32_t position, uint32_t pair) const {
    const float2 angle = rope.angle(position, pair);
    return {x.x * angle.x - x.y * angle.y, x.x * angle.y + x.y * angle.x};
  }
};

uint32_t shared_bytes(uint32_t head_dim) { return (kVectors + kKeyStride) * head_dim * sizeof(float); }

// Block (sum, KV head): the sums over its tiles.
__global__ void __launch_bounds__(kThreads)
    sum_weights(const StepParams* step, const HeadState* heads, QueryScoreParams p, const float* q,
                const __half* k, const __half* chunk_k, Rope rope, const uint32_t* lists, float* sums) {
  extern __shared__ float shared[];
  const StepParams s = begin_kernel(step);
  const Work w{s, heads, p, rope, lists, shared};
  const uint32_t each = tiles_of_sum(w.span), begin = blockIdx.x * each,
                 end = min(begin + each, query_tiles(w.span));
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t tile = begin; tile < end; ++tile) {
    __syncthreads();
    w.read_keys(k, chunk_k, tile);
    w.each_vector(q, [&](uint32_t vector, const float(&logits)[2]) {
      const uint32_t seen = entries_seen(w.span, vector / p.group), at = tile * kQueryScoreTile + lane;
      LogSum own = kNoSum;
      if (at < seen) add(own, logits[0]);
      if (at + kWarp < seen) add(own, logits[1]);
      own = warp_log_sum(own);
      if (lane != 0) return;
      float& sum = sums[w.sums_of(vector) + blockIdx.x];
      LogSum all = tile == begin ? kNoSum : LogSum{sum, 1};
      if (own.sum > 0) add(all, own);
      sum = log_of(all);
    });
  }
}

// A warp a vector; block (vectors, KV head).
__global__ void __launch_bounds__(kThreads)
    merge_sums(const StepParams* step, const HeadState* heads, QueryScoreParams p, const float* sinks,
               const uint32_t* lists, float* sums) {
  const StepParams s = begin_kernel(step);
  const uint32_t head = p.first_head + blockIdx.y, lane = threadIdx.x % kWarp;
  const QuerySpan span = query_span(s, heads[head], p, entries_of(s, heads[head], list_of(p, lists, head)));
  const uint32_t vector = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (span.count == 0 || vector >= span.rows * p.group) return;
  float* own = sums + (uint64_t(head) * p.rows * p.group + vector) * kQueryScoreSums;
  const uint32_t count = units(query_tiles(span), tiles_of_sum(span));
  LogSum sum = kNoSum;
  for (uint32_t i = lane; i < count; i += kWarp) add(sum, own[i]);
  sum = warp_log_sum(sum);
  if (lane != 0) return;
  LogSum all = kNoSum;
  if (sum.sum > 0) add(all, sum);
  if (sinks) add(all, sinks[head * p.group + vector % p.group]);
  own[0] = log_of(all);
}

// The entries of tiles blockIdx.x, + gridDim.x, ... of KV head blockIdx.y: the largest logarithm of a weight,
// or the sum of weights.
__global__ void __launch_bounds__(kThreads)
    score_entries(const StepParams* step, const HeadState* heads, QueryScoreParams p, const float* q,
                  const __half* k, const __half* chunk_k, Rope rope, const uint32_t* lists, const float* sums,
                  float* cis, float* chunk_cis) {
  extern __shared__ float shared[];
  __shared__ float of_warps[kWarps][kQueryScoreTile];
  const StepParams s = begin_kernel(step);
  const Work w{s, heads, p, rope, lists, shared};
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, end = w.span.sinks + w.span.scored;
  const bool largest = p.kind == kQueryRows;
  const float none = largest ? -kInfinity : 0;
  for (uint32_t tile = blockIdx.x; tile * kQueryScoreTile < end; tile += gridDim.x) {
    float scores[2] = {none, none};
    __syncthreads();
    w.read_keys(k, chunk_k, tile);
    w.each_vector(q, [&](uint32_t vector, const float(&logits)[2]) {
      const float sum = sums[w.sums_of(vector)];
      for (uint32_t i = 0; i < 2; ++i) {
        const float log_weight = logits[i] - sum;
        if (!(log_weight > -kInfinity)) continue;
        scores[i] = largest ? fmaxf(scores[i], log_weight) : scores[i] + expf(log_weight);
      }
    });
    for (uint32_t i = 0; i < 2; ++i) of_warps[warp][lane + i * kWarp] = scores[i];
    __syncthreads();
    const uint32_t i = threadIdx.x, index = tile * kQueryScoreTile + i;
    if (i >= kQueryScoreTile || index < w.span.sinks || index >= end) continue;
    float score = none;
    for (uint32_t from = 0; from < kWarps; ++from)
      score = largest ? fmaxf(score, of_warps[from][i]) : score + of_warps[from][i];
    *w.at(cis, chunk_cis, entry_of(w.span, index), 1) = score;
  }
}

// The mean of all heads' scores, for all of them; the last entry stays whatever it is worth.
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
  const __half *k = data<__half>(op.k.values), *chunk_k = data<__half>(op.chunk_k.values);
  const float* q = data<float>(op.q);
  const uint32_t* lists = data<uint32_t>(op.list);
  float *sums = data<float>(op.sums), *cis = data<float>(op.cis), *chunk_cis = data<float>(op.chunk_cis);
  const Rope rope{data<float2>(op.rope), p.rope.n_rot / 2};
  const uint32_t shared = shared_bytes(p.head_dim), vectors = p.rows * p.group;
  // As many entries as a head's run has room for on average; what is scored of a chunk begins behind the
  // sinks.
  const uint64_t room = op.k.values.bytes / kv_bytes(op.k.type, p.head_dim) / (p.first_head + p.heads);
  const uint64_t entries = (p.kind == kQueryRows ? p.sinks : room) + l.max_rows;
  const uint32_t tiles = static_cast<uint32_t>(ceil_div(entries, kQueryScoreTile));
  launch(l, sum_weights, dim3(kQueryScoreSums, p.heads), kThreads, shared, l.step, heads, p, q, k, chunk_k,
         rope, lists, sums);
  launch(l, merge_sums, dim3(static_cast<uint32_t>(ceil_div(vectors, kWarps)), p.heads), kThreads, 0, l.step,
         heads, p, data<float>(op.sinks), lists, sums);
  launch(l, score_entries, dim3(tiles, p.heads), kThreads, shared, l.step, heads, p, q, k, chunk_k, rope,
         lists, sums, cis, chunk_cis);
  if (p.kind == kQueryLast)
    launch(l, share_mean, static_cast<uint32_t>(ceil_div(entries, kThreads)), kThreads, 0, l.step, heads, p,
           cis, chunk_cis);
}

}  // namespace thimble::cuda
