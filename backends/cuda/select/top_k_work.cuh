// The work of top_k: which scores of a head compete, how many of them are picked, and what is listed anyway;
// and the two ways to launch it. Host and device side.
#pragma once

#include "backends/cuda/select/score_parts.cuh"

namespace thimble::cuda::topk {

// Small enough for a block to start while blocks of the previous kernel still run.
inline constexpr uint32_t kThreads = 512, kWarps = kThreads / kWarp;

// Votes of KV heads that are made in the same kernel: the inputs and outputs of a Vote of kVoteGroup and, if
// log-sum-exps are also made here, their parts.
struct Ballot {
  const float* scores = nullptr;  // null: the votes are already made
  float *lse = nullptr, *votes = nullptr;
  VoteParams p{};
  ScoreParts sums{};  // empty: lse is already made
};

struct Operands {
  const StepParams* step;
  const HeadState* heads;  // from KV head 0 of the layer on
  const float *scores, *chunk_scores;
  const int32_t* pos;
  const GateState* gate;
  uint32_t* list;
  TopKParams p;
  Ballot ballot;
};

// units(), without a division if units are entries.
__device__ inline uint32_t units_of(uint32_t entries, uint32_t page) {
  return page == 1 ? entries : units(entries, page);
}

enum class Task { kListEverything, kRenewLocal, kPick };

// `cached`: the step reuses a selection.
__device__ inline Task task(const Operands& o, const StepParams& s, const HeadState& state, bool cached) {
  const uint32_t n = step_entries(s, state);
  const bool picks = o.p.keep == kKeepOfHead ? state.keep < n : selects(s, units_of(n, o.p.page));
  if (!picks) return Task::kListEverything;
  return cached ? Task::kRenewLocal : Task::kPick;
}

// The competing scores: those of the pool's entries, then those of the chunk's.
struct Scores {
  const float *pool, *behind;  // `behind` is offset so that it can be indexed like the pool
  uint32_t n_entries;          // in the pool
  __device__ const float* at(uint32_t i) const { return (i < n_entries ? pool : behind) + i; }
};

struct Range {
  uint32_t begin, end;
  __device__ uint32_t size() const { return end - begin; }
  // One of `parts` pieces. Pieces begin at multiples of a warp from `begin`; the last ones may be empty.
  __device__ Range part(uint32_t i, uint32_t parts) const {
    const uint32_t step = (size() + parts * kWarp - 1) / (parts * kWarp) * kWarp;
    const uint32_t from = min(i * step, size());
    return {begin + from, begin + min(from + step, size())};
  }
  // The part of this range that is inside another range.
  __device__ Range within(Range r) const {
    return {min(max(begin, r.begin), r.end), min(max(end, r.begin), r.end)};
  }
};

// The inputs of one head's list. A unit is an entry or a page of entries.
struct HeadWork {
  uint32_t entries;
  Range middle;      // units that are listed by their score; those before and after are always listed
  Range candidates;  // indices of the competing scores: the middle's units, or all positions
  uint32_t wanted;   // how many candidates are picked
  Scores scores;
  const int32_t* pos;  // set if a score's index is its entry's position, else null

  __device__ bool picks_some() const { return wanted > 0 && wanted < candidates.size(); }
};

__device__ inline HeadWork head_work(const Operands& o, const StepParams& s, const HeadState& state,
                                     uint32_t head) {
  const uint32_t n = step_entries(s, state);
  const Regions r =
      o.p.keep == kKeepOfHead ? kept_regions(state, n) : selected_regions(s, units_of(n, o.p.page));
  const Range middle{r.begin, r.end};
  if (o.p.by_position) {
    const Range positions{0, static_cast<uint32_t>(s.position) + s.n_rows};
    // If all positions are held, an entry's index is its position.
    const int32_t* pos = positions.end == n ? nullptr : o.pos + state.first;
    return {n, middle, positions, r.wanted, {o.scores, o.scores, 0}, pos};
  }
  const float* own = o.scores + (o.p.in_runs ? state.first : uint64_t(head) * o.p.score_capacity);
  const float* behind =
      o.chunk_scores ? o.chunk_scores + uint64_t(head) * o.p.chunk_capacity - state.n_entries : own;
  return {n, middle, middle, r.wanted, {own, behind, state.n_entries}, nullptr};
}

__device__ inline uint32_t* list_of(const Operands& o, uint32_t head) {
  return o.list + uint64_t(head) * o.p.list_capacity;
}

__device__ inline void list_everything(uint32_t n, uint32_t* list, uint32_t part, uint32_t parts) {
  if (part == 0 && threadIdx.x == 0) list[0] = n;
  for (uint32_t i = part * kThreads + threadIdx.x; i < n; i += parts * kThreads) list[1 + i] = i;
}

// Rewrites the last n_local entries of a list whose units are entries.
__device__ inline void renew_local(const StepParams& s, uint32_t entries, uint32_t* list) {
  uint32_t* local = list + 1 + list[0] - s.n_local;
  for (uint32_t i = threadIdx.x; i < s.n_local; i += kThreads) local[i] = middle_end(s, entries) + i;
}

// ---- recording ----

// Words of marks in a block that lists one of `parts` pieces of a head's units.
inline uint32_t mark_words(uint64_t units, uint32_t parts) {
  return static_cast<uint32_t>(ceil_div(units, parts * kWarp));
}

// Upper bounds for one head.
struct Most {
  uint64_t units;  // possible units
  // Competing candidates in the usual case; shared memory is sized to keep this many keys
  uint64_t candidates;
};

// One cluster of blocks per head (from Hopper on) or one block (top_k_cluster.cu): whether it is possible,
// and the launch.
bool takes_one_kernel(const Card&, const Most&);
void launch_one_kernel(const Launch&, const Operands&, const Most&);

// Several blocks per head and four kernels, on every card (top_k_blocks.cu).
void launch_several_kernels(const Launch&, const Operands&, const Most&);
uint64_t several_kernels_scratch(const Card&, uint32_t heads);

}  // namespace thimble::cuda::topk
