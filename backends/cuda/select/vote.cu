// vote: combines the heads' scores into one vote an entry (group) or a position (layer), in the log domain.
#include <algorithm>

#include "backends/cuda/ops.h"
#include "backends/cuda/select/vote.cuh"

namespace thimble::cuda {

constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp;
constexpr uint32_t kTile = 1024;  // positions that one block looks through for candidates
constexpr uint32_t kNobody = ~0u;

// The first of [begin, end) that holds `position` or a later one, or end; asked by a whole warp. Positions
// ascend from 0 on, so entry i holds position i or a later one, and without eviction one look is enough.
__device__ static uint32_t first_at(const int32_t* pos, uint32_t begin, uint32_t end, uint32_t position) {
  uint32_t low = begin, high = max(begin, min(end, position));  // the answer's bounds
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

__device__ static void group_vote(const StepParams& s, const VoteParams& p, const float* scores,
                                  const float* lse, float* votes) {
  const uint32_t begin = s.n_init, end = middle_end(s), n = step_entries(s),
                 pieces = (n + kThreads - 1) / kThreads;
  for (uint32_t item = blockIdx.x; item < p.heads * pieces; item += gridDim.x) {
    const uint32_t head = item / pieces, entry = item % pieces * kThreads + threadIdx.x;
    if (entry >= n) continue;
    float vote[1] = {-kInfinity};
    if (entry >= begin && entry < end)
      group_votes<1>(
          scores + uint64_t(head) * p.group * p.score_capacity, p.group, p.score_capacity, {entry},
          [&] { return lse + head * p.group; }, vote);
    votes[uint64_t(head) * p.vote_capacity + entry] = vote[0];
  }
}

// A block takes 256 positions, and a warp of it one of 8 KV heads at a time: it finds the entries that hold
// them.
__device__ static void layer_vote(const StepParams& s, const VoteParams& p, const float* scores,
                                  const float* lse, const int32_t* pos, float* votes) {
  constexpr uint32_t kGroup = 4, kRounds = kThreads / kWarp;  // query heads at once, of each of the 8
  __shared__ uint32_t holders[kWarps][kThreads];
  alignas(16) __shared__ float own_lse[kWarps][kGroup];
  const uint32_t begin = s.n_init, end = middle_end(s),
                 positions = static_cast<uint32_t>(s.position) + s.n_rows;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (uint32_t first = blockIdx.x * kThreads; first < positions; first += gridDim.x * kThreads) {
    LogSum vote = kNoSum;
    for (uint32_t heads = 0; heads < p.heads; heads += kWarps) {
      const uint32_t head = heads + warp;
#pragma unroll
      for (uint32_t i = 0; i < kRounds; ++i) holders[warp][i * kWarp + lane] = kNobody;
      __syncwarp();
      if (head < p.heads) {
        const int32_t* own = pos + uint64_t(head) * p.capacity;
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
        if (lane < kGroup)  // infinity leaves nothing of the score of a query head that there is not
          own_lse[warp][lane] =
              head < p.heads && in_group + lane < p.group ? lse[head * p.group + in_group + lane] : kInfinity;
        uint64_t query[kGroup];
#pragma unroll
        for (uint32_t h = 0; h < kGroup; ++h)
          query[h] = uint64_t(min(in_group + h, p.group - 1)) * p.score_capacity;
        __syncthreads();
        float x[kWarps * kGroup];  // all under way at once
#pragma unroll
        for (uint32_t i = 0; i < kWarps; ++i) {
          const uint32_t entry = holders[i][threadIdx.x];
          const float* own = scores + uint64_t(heads + i) * p.group * p.score_capacity + entry;
#pragma unroll
          for (uint32_t h = 0; h < kGroup; ++h)
            x[i * kGroup + h] = entry != kNobody ? own[query[h]] : -kInfinity;
        }
#pragma unroll
        for (uint32_t i = 0; i < kWarps * kGroup; ++i) x[i] -= own_lse[i / kGroup][i % kGroup];
        vote.add(log_sum(x));
        __syncthreads();
      }
    }
    if (first + threadIdx.x < positions) votes[first + threadIdx.x] = vote.value();
  }
}

// Blocks take pieces of 256 entries of a head or positions of the layer in turn.
static __global__ void __launch_bounds__(kThreads)
    vote_kernel(const StepParams* step, VoteParams p, const float* scores, const float* lse,
                const int32_t* pos, const GateState* gate, float* votes) {
  const StepParams s = begin_kernel(step);
  const bool cached = selection_cached(gate);
  if (!selects(s) || cached) return;
  if (s.vote_scope == kVoteGroup)
    group_vote(s, p, scores, lse, votes);
  else
    layer_vote(s, p, scores, lse, pos, votes);
}

// ---- max-pool of `window` over the candidates, stride 1 ----
// A group's candidates are the middle entries. A layer's are the positions that have a vote, in order, so
// they are counted and packed first.

struct Candidates {
  float* votes;      // group: [kv heads][vote_capacity] by entry; layer: packed
  uint32_t* places;  // layer: the candidates' positions
  uint32_t* counts;  // layer: of each tile, then of all
};

// Block: one tile of positions. The number of candidates in the tile, and this thread's among them.
struct Packed {
  uint32_t count, index;
  bool candidate;
};
__device__ static Packed pack(bool candidate) {
  __shared__ uint32_t of_warp[kTile / kWarp];
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp,
                 those = __ballot_sync(~0u, candidate);
  if (lane == 0) of_warp[warp] = __popc(those);
  __syncthreads();
  Packed r{0, static_cast<uint32_t>(__popc(those & ((1u << lane) - 1))), candidate};
  for (uint32_t w = 0; w < kTile / kWarp; ++w) {
    if (w < warp) r.index += of_warp[w];
    r.count += of_warp[w];
  }
  return r;
}

// The votes of the block's tile, one a thread; -inf behind the end.
__device__ static float tile_vote(const StepParams& s, const float* votes) {
  const uint32_t position = blockIdx.x * kTile + threadIdx.x,
                 positions = static_cast<uint32_t>(s.position) + s.n_rows;
  return position < positions ? votes[position] : -kInfinity;
}

static __global__ void __launch_bounds__(kTile)
    count_kernel(const StepParams* step, const GateState* gate, const float* votes, Candidates to) {
  begin_kernel();
  if (!selects(*step) || selection_cached(gate) || step->vote_scope == kVoteGroup) return;
  const Packed packed = pack(tile_vote(*step, votes) != -kInfinity);
  if (threadIdx.x == 0) to.counts[blockIdx.x] = packed.count;
}

static __global__ void __launch_bounds__(kTile)
    pack_kernel(const StepParams* step, VoteParams p, const GateState* gate, const float* votes,
                Candidates to) {
  begin_kernel();
  const bool cached = selection_cached(gate);
  if (!selects(*step) || cached) return;
  if (step->vote_scope == kVoteGroup) {
    const uint32_t begin = step->n_init, n = middle_end(*step) - begin;
    for (uint64_t i = blockIdx.x * uint64_t(kTile) + threadIdx.x; i < uint64_t(p.heads) * n;
         i += gridDim.x * uint64_t(kTile)) {
      const uint64_t at = i / n * p.vote_capacity + begin + i % n;
      to.votes[at] = votes[at];
    }
    return;
  }
  __shared__ uint32_t of_warp[kTile / kWarp];
  uint32_t before = 0;  // candidates in the tiles before this one
  for (uint32_t tile = threadIdx.x; tile < blockIdx.x; tile += kTile) before += to.counts[tile];
  before = __reduce_add_sync(~0u, before);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = before;
  const float vote = tile_vote(*step, votes);
  const Packed packed = pack(vote != -kInfinity);  // its barrier also stands behind of_warp
  before = 0;
  for (uint32_t w = 0; w < kTile / kWarp; ++w) before += of_warp[w];
  if (packed.candidate) {
    to.votes[before + packed.index] = vote;
    to.places[before + packed.index] = blockIdx.x * kTile + threadIdx.x;
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) to.counts[gridDim.x] = before + packed.count;
}

static __global__ void __launch_bounds__(kThreads)
    max_pool_kernel(const StepParams* step, VoteParams p, const GateState* gate, Candidates from,
                    uint32_t tiles, float* votes) {
  begin_kernel();
  if (!selects(*step) || selection_cached(gate)) return;
  const bool group = step->vote_scope == kVoteGroup;
  const uint32_t begin = step->n_init, n = group ? middle_end(*step) - begin : from.counts[tiles];
  // (window - 1) / 2 before the candidate. An even window has one output fewer, so the last candidate gets
  // -inf and is never picked.
  const uint32_t before = (p.window - 1) / 2, outputs = n - (p.window % 2 == 0);
  const uint64_t all = group ? uint64_t(p.heads) * n : n;
  for (uint64_t at = blockIdx.x * uint64_t(kThreads) + threadIdx.x; at < all;
       at += gridDim.x * uint64_t(kThreads)) {
    const uint32_t i = static_cast<uint32_t>(at % n), first = i - min(i, before);
    const uint64_t head_start = group ? at / n * p.vote_capacity + begin : 0;
    const uint32_t last = static_cast<uint32_t>(min(uint64_t(n), uint64_t(i) + p.window - before));
    float top = -kInfinity;
    if (i < outputs)
      for (uint32_t j = first; j < last; ++j) top = fmaxf(top, from.votes[head_start + j]);
    votes[group ? head_start + i : from.places[i]] = top;
  }
}

// Scratch of a max-pool over at most so many votes: Candidates, one part after the other.
static uint64_t part_bytes(uint64_t votes) { return round_up(votes * sizeof(float), 256); }
static uint64_t pool_bytes(uint64_t votes) {
  return 2 * part_bytes(votes) + (ceil_div(votes, kTile) + 1) * sizeof(uint32_t);
}

void vote(const Launch& l, const Vote& op) {
  const VoteParams& p = op.p;
  const GateState* gate = data<GateState>(op.gate);
  float* const votes = data<float>(op.votes);
  // The view is as large as either scope needs.
  const uint64_t most_votes = op.votes.bytes / sizeof(float);
  constexpr uint32_t kBlocksEach = 4;  // on a multiprocessor: as many as their registers allow
  const uint32_t blocks = static_cast<uint32_t>(std::min<uint64_t>(
      ceil_div(most_votes, kThreads) + p.heads, uint64_t(l.card.multiprocessors) * kBlocksEach));
  launch(l, vote_kernel, blocks, kThreads, 0, l.step, p, data<float>(op.scores), data<float>(op.lse),
         data<int32_t>(op.pos), gate, votes);
  if (p.window <= 1) return;
  const uint32_t tiles = static_cast<uint32_t>(ceil_div(most_votes, kTile));
  const Candidates candidates{reinterpret_cast<float*>(l.scratch),
                              reinterpret_cast<uint32_t*>(l.scratch + part_bytes(most_votes)),
                              reinterpret_cast<uint32_t*>(l.scratch + 2 * part_bytes(most_votes))};
  launch(l, count_kernel, tiles, kTile, 0, l.step, gate, votes, candidates);
  launch(l, pack_kernel, tiles, kTile, 0, l.step, p, gate, votes, candidates);
  launch(l, max_pool_kernel, blocks, kThreads, 0, l.step, p, gate, candidates, tiles, votes);
}

uint64_t vote_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  if (s.positions == 0) return 0;
  return pool_bytes(std::max<uint64_t>(s.positions, uint64_t(m.kv_heads) * s.pool_capacity));
}

}  // namespace thimble::cuda
