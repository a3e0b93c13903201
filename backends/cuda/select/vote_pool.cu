// The max-pool of a vote (methods 3.7): each candidate gets the largest vote in its window, with stride 1.
// The candidates of a group are the middle's entries or pages. The candidates of a layer are the positions
// that have a vote, in order, so these are counted and packed first.
#include <algorithm>

#include "backends/cuda/kernel.cuh"
#include "backends/cuda/select/vote_pool.h"

namespace thimble::cuda {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kTile = 1024;  // positions that a block searches for candidates

struct Candidates {
  float* votes;      // group: [kv heads][vote_capacity], as in the op; layer: packed
  uint32_t* places;  // layer: the candidates' positions
  uint32_t* counts;  // layer: per tile, then the total
};

// One tile of positions per block: the number of candidates in it, and the thread's index among them.
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

// The votes of the block's tile, one per thread; -inf after the end.
__device__ static float tile_vote(const StepParams& s, const float* votes) {
  const uint32_t position = blockIdx.x * kTile + threadIdx.x,
                 positions = static_cast<uint32_t>(s.position) + s.n_rows;
  return position < positions ? votes[position] : -kInfinity;
}

static __global__ void __launch_bounds__(kTile)
    count_kernel(const StepParams* step, const HeadState* heads, const GateState* gate, const float* votes,
                 Candidates to) {
  begin_kernel();
  if (!selects(*step, step_entries(*step, heads[0])) || selection_cached(gate)) return;
  const Packed packed = pack(tile_vote(*step, votes) != -kInfinity);
  if (threadIdx.x == 0) to.counts[blockIdx.x] = packed.count;
}

static __global__ void __launch_bounds__(kTile)
    pack_kernel(const StepParams* step, const HeadState* heads, const GateState* gate, const float* votes,
                Candidates to) {
  begin_kernel();
  const bool cached = selection_cached(gate);
  if (!selects(*step, step_entries(*step, heads[0])) || cached) return;
  __shared__ uint32_t of_warp[kTile / kWarp];
  uint32_t before = 0;  // candidates in the tiles before this one
  for (uint32_t tile = threadIdx.x; tile < blockIdx.x; tile += kTile) before += to.counts[tile];
  before = __reduce_add_sync(~0u, before);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = before;
  const float vote = tile_vote(*step, votes);
  const Packed packed = pack(vote != -kInfinity);  // its barrier also protects of_warp
  before = 0;
  for (uint32_t w = 0; w < kTile / kWarp; ++w) before += of_warp[w];
  if (packed.candidate) {
    to.votes[before + packed.index] = vote;
    to.places[before + packed.index] = blockIdx.x * kTile + threadIdx.x;
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) to.counts[gridDim.x] = before + packed.count;
}

// Copies the votes of the middle of KV head blockIdx.y, because the max-pool overwrites the original.
static __global__ void __launch_bounds__(kTile)
    copy_kernel(const StepParams* step, const HeadState* heads, VoteParams p, const GateState* gate,
                const float* votes, Candidates to) {
  begin_kernel();
  const uint32_t n = units(step_entries(*step, heads[blockIdx.y]), p.page);
  const bool cached = selection_cached(gate);
  if (!selects(*step, n) || cached) return;
  const uint64_t own = uint64_t(blockIdx.y) * p.vote_capacity;
  for (uint32_t i = step->n_init + blockIdx.x * kTile + threadIdx.x; i < middle_end(*step, n);
       i += gridDim.x * kTile)
    to.votes[own + i] = votes[own + i];
}

// The largest vote in the window around candidate i of n, which begins (window - 1) / 2 before it. An even
// window has one output fewer, so the last candidate gets -inf and is never picked.
__device__ static float window_top(const float* candidates, uint32_t n, uint32_t i, uint32_t window) {
  const uint32_t before = (window - 1) / 2, outputs = n - (window % 2 == 0);
  const uint32_t last = static_cast<uint32_t>(min(uint64_t(n), uint64_t(i) + window - before));
  float top = -kInfinity;
  if (i < outputs)
    for (uint32_t j = i - min(i, before); j < last; ++j) top = fmaxf(top, candidates[j]);
  return top;
}

static __global__ void __launch_bounds__(kThreads)
    pool_group_kernel(const StepParams* step, const HeadState* heads, VoteParams p, const GateState* gate,
                      Candidates from, float* votes) {
  begin_kernel();
  const uint32_t all = units(step_entries(*step, heads[blockIdx.y]), p.page);
  if (!selects(*step, all) || selection_cached(gate)) return;
  const uint64_t own = uint64_t(blockIdx.y) * p.vote_capacity + step->n_init;
  const uint32_t n = middle_end(*step, all) - step->n_init;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < n; i += gridDim.x * kThreads)
    votes[own + i] = window_top(from.votes + own, n, i, p.window);
}

static __global__ void __launch_bounds__(kThreads)
    pool_layer_kernel(const StepParams* step, const HeadState* heads, uint32_t window, const GateState* gate,
                      Candidates from, uint32_t tiles, float* votes) {
  begin_kernel();
  if (!selects(*step, step_entries(*step, heads[0])) || selection_cached(gate)) return;
  const uint32_t n = from.counts[tiles];
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < n; i += gridDim.x * kThreads)
    votes[from.places[i]] = window_top(from.votes, n, i, window);
}

// Scratch for this many votes: the arrays of Candidates, one after the other.
static uint64_t part_bytes(uint64_t votes) { return round_up(votes * sizeof(float), 256); }
uint64_t vote_pool_scratch(uint64_t votes) {
  return 2 * part_bytes(votes) + (ceil_div(votes, kTile) + 1) * sizeof(uint32_t);
}

void pool_votes(const Launch& l, const Vote& op) {
  const VoteParams& p = op.p;
  const GateState* gate = data<GateState>(op.gate);
  const HeadState* const heads = l.heads + p.head_state;
  float* const votes = data<float>(op.votes);
  const bool group = p.scope == kVoteGroup;
  const uint64_t most = uint64_t(p.vote_capacity) * (group ? p.heads : 1);
  const Candidates candidates{reinterpret_cast<float*>(l.scratch),
                              reinterpret_cast<uint32_t*>(l.scratch + part_bytes(most)),
                              reinterpret_cast<uint32_t*>(l.scratch + 2 * part_bytes(most))};
  const uint32_t tiles = static_cast<uint32_t>(ceil_div(p.vote_capacity, kTile)),
                 pieces = static_cast<uint32_t>(ceil_div(p.vote_capacity, kThreads));
  if (group) {
    launch(l, copy_kernel, dim3(tiles, p.heads), kTile, 0, l.step, heads, p, gate, votes, candidates);
    launch(l, pool_group_kernel, dim3(pieces, p.heads), kThreads, 0, l.step, heads, p, gate, candidates,
           votes);
  } else {
    launch(l, count_kernel, tiles, kTile, 0, l.step, heads, gate, votes, candidates);
    launch(l, pack_kernel, tiles, kTile, 0, l.step, heads, gate, votes, candidates);
    launch(l, pool_layer_kernel, pieces, kThreads, 0, l.step, heads, p.window, gate, candidates, tiles,
           votes);
  }
}

}  // namespace thimble::cuda
