// vote: combines the heads' scores into one vote per entry (group) or per position (layer), in the log
// domain.
#include <algorithm>
#include <bit>

#include "backends/cuda/ops.h"
#include "backends/cuda/select/score_parts.cuh"
#include "backends/cuda/select/vote.cuh"
#include "backends/cuda/select/vote_pool.h"

namespace thimble::cuda {

constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp;
constexpr uint32_t kNobody = ~0u;

// The index of the first entry of [begin, end) with at least this position, or end; a whole warp calls this.
// Positions ascend from 0 on, so entry i has at least position i. Without eviction a single load is enough.
__device__ static uint32_t first_at(const int32_t* pos, uint32_t begin, uint32_t end, uint32_t position) {
  uint32_t low = begin, high = max(begin, min(end, position));  // bounds of the result
  if (low == high || static_cast<uint32_t>(pos[high - 1]) < position) return high;
  --high;
  while (low < high) {
    const uint32_t step = (high - low + kWarp - 1) / kWarp, last = low + (threadIdx.x % kWarp + 1) * step - 1;
    const uint32_t before =
        __popc(__ballot_sync(~0u, last < high && static_cast<uint32_t>(pos[last]) < position));
    low += before * step;
    high = min(high, low + step - 1);
  }
  return low;
}

// The blocks of KV head blockIdx.y process pieces of 256 entries or pages in turn.
static __global__ void __launch_bounds__(kThreads)
    vote_group_kernel(const StepParams* step, const HeadState* heads, VoteParams p, const float* scores,
                      const float* lse, const GateState* gate, float* votes) {
  release_successor();
  const StepParams s = *step;
  const uint32_t head = blockIdx.y, n = units(step_entries(s, heads[head]), p.page);
  await_predecessor();
  const bool cached = selection_cached(gate);
  if (!selects(s, n) || cached) return;
  const uint32_t begin = s.n_init, end = middle_end(s, n);
  for (uint32_t unit = blockIdx.x * kThreads + threadIdx.x; unit < n; unit += gridDim.x * kThreads) {
    float vote[1] = {-kInfinity};
    if (unit >= begin && unit < end)
      group_votes<1>(
          scores + uint64_t(head) * p.group * p.score_capacity, p.group, p.score_capacity, {unit},
          [&] { return lse + head * p.group; }, vote);
    votes[uint64_t(head) * p.vote_capacity + unit] = vote[0];
  }
}

// The log-sum-exps of a layer's query heads, summed from their parts if there are any; a block calls this.
// All heads have the same number of entries and therefore of parts. Block 0 stores the sums.
__device__ static void find_lses(const ScoreParts& sums, uint32_t queries, float* lse, float* own) {
  constexpr uint32_t kAtOnce = 4;  // per warp
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (!sums.sums)
    for (uint32_t query = threadIdx.x; query < queries; query += kThreads) own[query] = lse[query];
  else
#pragma unroll 1
    for (uint32_t first = warp; first < queries; first += kAtOnce * kWarps) {
      LogSum parts[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        parts[i] = first_part(sums.sums + min(first + i * kWarps, queries - 1) * sums.each, sums.each);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t query = min(first + i * kWarps, queries - 1);
        const float sum = log_sum_exp(sums.sums + query * sums.each, sums.each, parts[i]);
        if (lane == 0) own[query] = sum;
        if (lane == 0 && blockIdx.x == 0) lse[query] = sum;
      }
    }
  __syncthreads();
}

// Whether entry i of the middle holds position i in every head, as it does if nothing was evicted: positions
// ascend. A warp calls this.
__device__ static bool are_positions(const HeadState* heads, uint32_t count, const int32_t* pos,
                                     uint32_t end) {
  bool moved = false;
  for (uint32_t head = threadIdx.x % kWarp; head < count; head += kWarp)
    moved = moved || static_cast<uint32_t>(pos[heads[head].first + end - 1]) != end - 1;
  return !__any_sync(~0u, moved);
}

// The votes of a block if entries are positions; `slices` threads share the query heads of an entry.
__device__ static void vote_by_entry(const VoteParams& p, uint32_t slices, uint32_t begin, uint32_t end,
                                     uint32_t positions, const float* scores, const float* lse,
                                     float* votes) {
  constexpr uint32_t kAtOnce = 16;  // scores per thread
  __shared__ LogSum of_slices[kThreads];
  const uint32_t entries = kThreads / slices, slice = threadIdx.x / entries, queries = p.heads * p.group,
                 each = (queries + slices - 1) / slices, end_query = min((slice + 1) * each, queries);
#pragma unroll 1
  for (uint32_t first = blockIdx.x * entries; first < positions; first += gridDim.x * entries) {
    const uint32_t entry = first + threadIdx.x % entries;
    LogSum vote = kNoSum;
    if (entry >= begin && entry < end)
#pragma unroll 1
      for (uint32_t query = slice * each; query < end_query; query += kAtOnce) {
        float x[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i)
          x[i] = query + i < end_query ? scores[uint64_t(query + i) * p.score_capacity + entry] : -kInfinity;
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i)
          if (query + i < end_query) x[i] -= lse[query + i];
        add(vote, log_sum(x));
      }
    of_slices[threadIdx.x] = vote;
    __syncthreads();
    if (slice == 0 && entry < positions) {
      for (uint32_t i = 1; i < slices; ++i) add(vote, of_slices[threadIdx.x + i * entries]);
      votes[entry] = log_of(vote);
    }
    __syncthreads();
  }
}

// If entries have moved, blocks process pieces of 256 positions of the layer in turn. Each of 8 warps
// searches one of 8 KV heads at a time for the entries that hold these positions. All heads have the same
// number of entries.
static __global__ void __launch_bounds__(kThreads)
    vote_layer_kernel(const StepParams* step, const HeadState* heads, VoteParams p, uint32_t slices,
                      const float* scores, ScoreParts sums, float* lse, const int32_t* pos,
                      const GateState* gate, float* votes) {
  release_successor();
  const StepParams s = *step;
  const uint32_t n = step_entries(s, heads[0]);
  await_predecessor();
  const bool cached = selection_cached(gate);
  if (!selects(s, n) || cached) return;
  extern __shared__ float lses[];  // for all query heads
  const bool by_entry = are_positions(heads, p.heads, pos, middle_end(s, n));
  find_lses(sums, p.heads * p.group, lse, lses);
  if (by_entry)
    return vote_by_entry(p, slices, s.n_init, middle_end(s, n), static_cast<uint32_t>(s.position) + s.n_rows,
                         scores, lses, votes);
  // Query heads of each of the 8 KV heads at a time
  constexpr uint32_t kGroup = 4, kRounds = kThreads / kWarp;
  __shared__ uint32_t holders[kWarps][kThreads];
  alignas(16) __shared__ float own_lse[kWarps][kGroup];
  const uint32_t begin = s.n_init, end = middle_end(s, n),
                 positions = static_cast<uint32_t>(s.position) + s.n_rows;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (uint32_t first = blockIdx.x * kThreads; first < positions; first += gridDim.x * kThreads) {
    LogSum vote = kNoSum;
    for (uint32_t first_head = 0; first_head < p.heads; first_head += kWarps) {
      const uint32_t head = first_head + warp;
#pragma unroll
      for (uint32_t i = 0; i < kRounds; ++i) holders[warp][i * kWarp + lane] = kNobody;
      __syncwarp();
      if (head < p.heads) {
        const int32_t* own = pos + heads[head].first;
        const uint32_t from = first_at(own, begin, end, first) + lane;
        uint32_t at[kRounds];
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i)
          at[i] = from + i * kWarp < end ? static_cast<uint32_t>(own[from + i * kWarp]) - first : kThreads;
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i)
          if (at[i] < kThreads) holders[warp][at[i]] = from + i * kWarp;
      }
      for (uint32_t in_group = 0; in_group < p.group; in_group += kGroup) {
        if (lane < kGroup)  // with a log-sum-exp of infinity, a missing query head contributes nothing
          own_lse[warp][lane] = head < p.heads && in_group + lane < p.group
                                    ? lses[head * p.group + in_group + lane]
                                    : kInfinity;
        uint64_t query[kGroup];
#pragma unroll
        for (uint32_t h = 0; h < kGroup; ++h)
          query[h] = uint64_t(min(in_group + h, p.group - 1)) * p.score_capacity;
        __syncthreads();
        float x[kWarps * kGroup];  // all loaded at once
#pragma unroll
        for (uint32_t i = 0; i < kWarps; ++i) {
          const uint32_t entry = holders[i][threadIdx.x];
          const float* own = scores + uint64_t(first_head + i) * p.group * p.score_capacity + entry;
#pragma unroll
          for (uint32_t h = 0; h < kGroup; ++h)
            x[i * kGroup + h] = entry != kNobody ? own[query[h]] : -kInfinity;
        }
#pragma unroll
        for (uint32_t i = 0; i < kWarps * kGroup; ++i) x[i] -= own_lse[i / kGroup][i % kGroup];
        add(vote, log_sum(x));
        __syncthreads();
      }
    }
    if (first + threadIdx.x < positions) votes[first + threadIdx.x] = log_of(vote);
  }
}

void vote(const Launch& l, const Vote& op, const TokenScore* scored) {
  const VoteParams& p = op.p;
  const GateState* gate = data<GateState>(op.gate);
  const HeadState* const heads = l.heads + p.head_state;
  const float* const scores = data<float>(op.scores);
  float* const lse = data<float>(op.lse);
  float* const votes = data<float>(op.votes);
  constexpr uint32_t kBlocksEach = 4;  // per multiprocessor: as many as their registers allow
  const uint32_t pieces = static_cast<uint32_t>(ceil_div(p.vote_capacity, kThreads)),
                 most = l.card.multiprocessors * kBlocksEach,
                 slices = std::clamp(std::bit_ceil(p.heads * p.group) / 16, 1u, 4u);
  if (p.scope == kVoteGroup)
    launch(l, vote_group_kernel, dim3(std::clamp(most / p.heads, 1u, pieces), p.heads), kThreads, 0, l.step,
           heads, p, scores, lse, gate, votes);
  else
    launch(l, vote_layer_kernel, std::min(pieces * slices, most), kThreads, p.heads * p.group * sizeof(float),
           l.step, heads, p, slices, scores, scored ? score_parts(l, scored->p) : ScoreParts{}, lse,
           data<int32_t>(op.pos), gate, votes);
  if (p.window > 1) pool_votes(l, op);
}

void vote(const Launch& l, const Vote& op) { vote(l, op, nullptr); }

uint64_t vote_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  if (s.positions == 0) return 0;
  return vote_pool_scratch(std::max<uint64_t>(s.positions, uint64_t(m.kv_heads) * s.reach));
}

}  // namespace thimble::cuda
