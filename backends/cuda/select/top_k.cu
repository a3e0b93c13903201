// top_k: scores become ascending lists. Counts of the keys in ever narrower windows find the lowest key that
// is picked, ordered scans write the lists.
#include <algorithm>

#include "backends/cuda/cluster.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/order.cuh"
#include "backends/cuda/select/token_score.cuh"
#include "backends/cuda/select/vote.cuh"

namespace thimble::cuda {
namespace {

// From Hopper on a cluster of blocks a head, with the keys in its shared memory: 8 blocks, or 16 above
// kManyCandidates. On other cards one block a head while the keys fit there, else several blocks a head and
// four kernels. A block is small enough to start beside the kernel before.
constexpr uint32_t kThreads = 512, kWarps = kThreads / kWarp;
constexpr uint32_t kRanks = 8, kMostRanks = 16;  // blocks of a cluster
constexpr uint32_t kManyCandidates = 1 << 16;

// Three windows, of 2^32, 2^21 and 2^10 keys, find any key, with counts that shared memory holds easily.
constexpr uint32_t kPasses = 3, kBinBits = 11, kBins = 1 << kBinBits;
constexpr uint32_t kCoarse = kBins / kWarp;  // sums of 32 bins each
static_assert(kCoarse == 2 * kWarp, "a lane looks at two sums");

// Consecutive keys in bins of 2^shift each; the last bin takes all up to `high`.
struct Window {
  uint32_t low, high, shift;
  __device__ static uint32_t shift_over(uint32_t low, uint32_t high) {
    return 32 - min(32 - kBinBits, static_cast<uint32_t>(__clz(high - low))) - kBinBits;
  }
  __device__ static Window over(uint32_t low, uint32_t high) { return {low, high, shift_over(low, high)}; }
  __device__ bool contains(uint32_t key) const { return key - low <= high - low; }
  __device__ uint32_t bin(uint32_t key) const { return min((key - low) >> shift, kBins - 1); }
  __device__ Window within(uint32_t bin) const {
    const uint32_t begin = low + (bin << shift), left = high - begin;
    return over(begin, bin == kBins - 1 ? high : begin + min(left, (1u << shift) - 1));
  }
};

// Votes of KV heads that are made on the way: what a Vote of kVoteGroup is given and gives, and where
// log-sum-exps are made, too, their parts.
struct Ballot {
  const float* scores = nullptr;  // null: the votes are there
  float *lse = nullptr, *votes = nullptr;
  VoteParams p{};
  ScoreParts sums{};  // parts null: lse is there
};

struct Operands {
  const StepParams* step;
  const float *scores, *chunk_scores;
  const int32_t* pos;
  const GateState* gate;
  uint32_t* list;
  TopKParams p;
  Ballot ballot;
};

// ---- what a step asks for ----

enum class Task { kListEverything, kRenewLocal, kPick };

__device__ Task task(const Operands& o, const StepParams& s) {
  const bool cached = selection_cached(o.gate);  // read before it is known to be needed
  if (o.p.purpose == kTopKRetain) return s.keep >= step_entries(s) ? Task::kListEverything : Task::kPick;
  if (!selects(s)) return Task::kListEverything;
  return cached ? Task::kRenewLocal : Task::kPick;
}

// One threshold serves all heads where they vote for positions.
__device__ bool shares_threshold(const Operands& o, const StepParams& s) {
  return o.p.purpose == kTopKSelect && s.vote_scope == kVoteLayer;
}

// The scores that compete: of the pool's entries, then of the chunk's.
struct Scores {
  const float *pool, *behind;  // `behind` as if it began where the pool does
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
  // What of it lies in another range.
  __device__ Range within(Range r) const {
    return {min(max(begin, r.begin), r.end), min(max(end, r.begin), r.end)};
  }
};

// What one head's list is made from.
struct HeadWork {
  uint32_t entries;
  Range middle;      // entries that need a score to be listed; those before and behind are listed anyway
  Range candidates;  // indices of the scores that compete: the middle's entries, or all positions
  uint32_t wanted;   // how many candidates are picked
  Scores scores;
  const int32_t* pos;  // where a score's index is its entry's position, else null

  __device__ bool picks_some() const { return wanted > 0 && wanted < candidates.size(); }
};

__device__ HeadWork head_work(const Operands& o, const StepParams& s, uint32_t head) {
  const uint32_t n = step_entries(s);
  if (o.p.purpose == kTopKRetain) {
    const uint32_t last = min(s.protect_last, s.keep), first = min(s.protect_first, s.keep - last);
    const float* pool = o.scores + uint64_t(head) * o.p.score_capacity;
    const float* behind =
        o.chunk_scores ? o.chunk_scores + uint64_t(head) * o.p.chunk_capacity - s.n_entries : pool;
    const Scores scores{pool, behind, s.n_entries};
    return {n, {first, n - last}, {first, n - last}, s.keep - last - first, scores, nullptr};
  }
  const Range middle{s.n_init, middle_end(s)};
  if (!shares_threshold(o, s)) {
    const float* votes = o.scores + uint64_t(head) * o.p.score_capacity;
    return {n, middle, middle, s.select_k, {votes, votes, 0}, nullptr};
  }
  const Range positions{0, static_cast<uint32_t>(s.position) + s.n_rows};
  const int32_t* pos = o.pos + uint64_t(head) * o.p.pos_capacity;
  if (positions.end == n) pos = nullptr;  // in ascending order all positions are held
  return {n, middle, positions, s.select_k, {o.scores, o.scores, 0}, pos};
}

__device__ uint32_t* list_of(const Operands& o, uint32_t head) {
  return o.list + uint64_t(head) * o.p.list_capacity;
}

__device__ void list_everything(uint32_t n, uint32_t* list, uint32_t part, uint32_t parts) {
  if (part == 0 && threadIdx.x == 0) list[0] = n;
  for (uint32_t i = part * kThreads + threadIdx.x; i < n; i += parts * kThreads) list[1 + i] = i;
}

__device__ void renew_local(const StepParams& s, uint32_t* list) {
  uint32_t* local = list + 1 + list[0] - s.n_local;
  for (uint32_t i = threadIdx.x; i < s.n_local; i += kThreads) local[i] = middle_end(s) + i;
}

// ---- what a block does together; all of its threads call these ----

struct Found {
  uint32_t bin;     // kBins: there are fewer keys than wanted
  uint32_t wanted;  // of the keys in this bin, or below all bins, how many are picked
  uint32_t count;   // and how many the bin has
};

// What a head's list is picked by.
struct Threshold {
  uint32_t lowest;  // key
  uint32_t cut;     // of the keys equal to it, the first index
  __device__ bool picks(uint32_t key, uint32_t index) const {
    return key > lowest || (key == lowest && index >= cut);
  }
};

constexpr uint32_t kMostVoters = kWarps;  // query heads to a KV head

// So many keys are compared each with each, a thread with 8 of them.
constexpr uint32_t kFew = 64, kComparing = kThreads / kFew;

struct alignas(16) Shared {
  uint32_t bins[2][kBins];                  // taken in turn
  uint32_t coarse[2][kMostRanks][kCoarse];  // of all blocks
  uint64_t few[kFew];                       // key << 32 | index
  uint32_t gathered;                        // of them by this block
  uint32_t warp_sums[kWarps];
  uint32_t before[kThreads];
  Found found;
  uint32_t shares[kMostRanks];  // the blocks' shares of its count
  uint32_t bounds[2];           // of the samples
  Threshold threshold;
  uint32_t cut;                 // the last tie that is picked
  uint32_t marked;              // entries that this block lists
  uint32_t picked[kMostRanks];  // and all of the cluster
  float lse[kMostVoters];
  uint32_t number;  // whatever one thread tells the others
};

__device__ uint32_t lane() { return threadIdx.x % kWarp; }
__device__ uint32_t warp() { return threadIdx.x / kWarp; }

// x of this lane and of those before it.
__device__ uint32_t scan(uint32_t x) {
#pragma unroll
  for (uint32_t offset = 1; offset < kWarp; offset *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, x, offset);
    if (lane() >= offset) x += other;
  }
  return x;
}

__device__ void clear(uint32_t* bins, uint32_t count) {
  for (uint32_t i = threadIdx.x; i < count / 4; i += kThreads)
    reinterpret_cast<uint4*>(bins)[i] = {0, 0, 0, 0};
}

// Tells all blocks the sums of this one's bins.
template <uint32_t kBlocks>
__device__ void sum_bins(Shared& b, uint32_t turn, uint32_t rank) {
#pragma unroll
  for (uint32_t i = warp(); i < kCoarse; i += kWarps) {
    const uint32_t sum = __reduce_add_sync(~0u, b.bins[turn][i * kWarp + lane()]);
    if (lane() < kBlocks) *of_rank<kBlocks>(&b.coarse[turn][rank][i], lane()) = sum;
  }
}

// The bin of the wanted-th largest of the keys that the blocks counted. A warp looks for it among the sums,
// then in the bins of one.
template <uint32_t kBlocks>
__device__ Found find_bin(Shared& b, uint32_t turn, uint32_t wanted) {
  if (warp() == 0) {
    uint32_t high = 0, low = 0;
#pragma unroll
    for (uint32_t r = 0; r < kBlocks; ++r) {  // descending with lanes
      const uint2 sums = reinterpret_cast<const uint2*>(b.coarse[turn][r])[kWarp - 1 - lane()];
      low += sums.x;
      high += sums.y;
    }
    const uint32_t end = scan(high + low), before = end - high - low;
    const bool is_high = wanted <= before + high;
    const uint32_t reaching = __ballot_sync(~0u, wanted <= end);
    if (reaching) {
      const uint32_t finder = __ffs(reaching) - 1;
      const uint32_t coarse = __shfl_sync(~0u, kCoarse - 1 - 2 * lane() - !is_high, finder);
      const uint32_t left = wanted - __shfl_sync(~0u, is_high ? before : before + high, finder);

      const uint32_t bin = coarse * kWarp + kWarp - 1 - lane();
      uint32_t counts[kBlocks], count = 0;
#pragma unroll
      for (uint32_t r = 0; r < kBlocks; ++r) counts[r] = *of_rank<kBlocks>(b.bins[turn] + bin, r);
#pragma unroll
      for (uint32_t r = 0; r < kBlocks; ++r) count += counts[r];
      const uint32_t reached = scan(count);
      if (reached - count < left && left <= reached) {
        b.found = {bin, left - (reached - count), count};
#pragma unroll
        for (uint32_t r = 0; r < kBlocks; ++r) b.shares[r] = counts[r];
      }
    } else if (lane() == kWarp - 1) {
      b.found = {kBins, wanted - end, 0};
    }
  }
  __syncthreads();
  return b.found;
}

// How many of the first `count` of b.few are larger than the one that this thread and its neighbours look at.
__device__ uint32_t looked_at() { return threadIdx.x / kComparing; }
__device__ uint32_t larger_ones(const Shared& b, uint32_t count) {
  const uint64_t own = b.few[looked_at()];
  uint32_t larger = 0;
#pragma unroll
  for (uint32_t j = 0; j < kFew; j += kComparing) {
    const uint32_t other = j + threadIdx.x % kComparing;
    larger += other < count && b.few[other] > own;
  }
#pragma unroll
  for (uint32_t offset = 1; offset < kComparing; offset *= 2) larger += __shfl_xor_sync(~0u, larger, offset);
  return larger;
}

// Where to look first for the key that is `wanted` of `all`: b.few are kFew samples, and the window's bins
// run between two of them that most likely have it between them; where there is no such sample, as far again
// as the two are apart. Where 2,048 of 131,072 are picked, 9 % of the keys lie in the window and about 10 in
// the bin that is looked for, however they are distributed.
__device__ Window sampled_window(Shared& b, uint32_t wanted, uint32_t all) {
  const float share = static_cast<float>(wanted) / static_cast<float>(all), mean = kFew * share;
  const float slack = 3 * sqrtf(mean * (1 - share)) + 2;  // three standard deviations
  const bool open_high = mean < slack, open_low = mean + slack >= kFew;
  const uint32_t larger = larger_ones(b, kFew);
  if (threadIdx.x % kComparing == 0) {
    if (larger == (open_low ? kFew - 1 : static_cast<uint32_t>(mean + slack)))
      b.bounds[0] = static_cast<uint32_t>(b.few[looked_at()] >> 32);
    if (larger == (open_high ? 0 : static_cast<uint32_t>(mean - slack)))
      b.bounds[1] = static_cast<uint32_t>(b.few[looked_at()] >> 32);
  }
  __syncthreads();
  uint32_t low = b.bounds[0], high = b.bounds[1];
  const uint32_t apart = high - low;
  if (open_high) high += min(apart, ~0u - high);
  if (open_low) low -= min(apart, low);
  return {low, ~0u, Window::shift_over(low, high)};
}

// The index of the wanted-th key equal to `bits`, counted from the end of the range.
template <typename Keys>
__device__ uint32_t tie_from_end(Shared& b, const Keys& keys, uint32_t bits, Range range, uint32_t wanted) {
  const Range own = range.part(warp(), kWarps);
  uint32_t ties = 0;
#pragma unroll 4
  for (uint32_t i = own.begin + lane(); i < own.end; i += kWarp) ties += keys.key(i) == bits;
  ties = __reduce_add_sync(~0u, ties);
  if (lane() == 0) b.warp_sums[warp()] = ties;
  __syncthreads();
  const uint32_t behind =
      __reduce_add_sync(~0u, lane() > warp() && lane() < kWarps ? b.warp_sums[lane()] : 0);
  if (behind < wanted && wanted <= behind + ties) {
    uint32_t left = wanted - behind;
    for (uint32_t tile = (own.size() + kWarp - 1) / kWarp; tile-- > 0;) {
      const uint32_t i = own.begin + tile * kWarp + lane();
      const uint32_t equal = __ballot_sync(~0u, i < own.end && keys.key(i) == bits), count = __popc(equal);
      if (left <= count) {
        if (equal >> lane() & 1 && __popc(equal >> lane()) == left) b.number = i;
        break;
      }
      left -= count;
    }
  }
  __syncthreads();
  return b.number;
}

// Where no score decides.
__device__ Threshold trivial_threshold(const HeadWork& w) {
  return w.wanted == 0 ? Threshold{~0u, ~0u} : Threshold{0, 0};
}

// Sets a bit in `marks` for each entry of the range that is picked, and counts them in b.marked. `pos` as in
// HeadWork.
template <typename Keys>
__device__ void mark_picked(Shared& b, Range range, const Keys& keys, const int32_t* pos, Threshold threshold,
                            uint32_t* marks) {
  if (threadIdx.x == 0) b.marked = 0;
  __syncthreads();
  constexpr uint32_t kLoads = 4;  // under way at once
  const uint32_t tiles = (range.size() + kWarp - 1) / kWarp;
  uint32_t count = 0;
#pragma unroll 1
  for (uint32_t first = warp(); first < tiles; first += kLoads * kWarps) {
    const uint32_t entry = range.begin + first * kWarp + lane();
    uint32_t index[kLoads], key[kLoads];
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) index[j] = min(entry + j * kThreads, range.end - 1);
    if (pos)
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j) index[j] = static_cast<uint32_t>(pos[index[j]]);
    keys.get(index, key);
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) {
      if (first + j * kWarps >= tiles) break;
      const uint32_t those =
          __ballot_sync(~0u, entry + j * kThreads < range.end && threshold.picks(key[j], index[j]));
      if (lane() == 0) marks[first + j * kWarps] = those;
      count += __popc(those);
    }
  }
  if (lane() == 0 && count) atomicAdd(&b.marked, count);
  __syncthreads();
}

// Writes the marked entries of a range, in order.
__device__ void write_marked(Shared& b, Range range, const uint32_t* marks, uint32_t* to) {
  const uint32_t tiles = (range.size() + kWarp - 1) / kWarp;
  for (uint32_t first = 0; first < tiles;
       first += kThreads) {  // a thread counts a tile, then the warps share the writing
    const uint32_t own = first + threadIdx.x, count = own < tiles ? __popc(marks[own]) : 0, end = scan(count);
    if (lane() == kWarp - 1) b.warp_sums[warp()] = end;
    __syncthreads();
    const uint32_t sum = lane() < kWarps ? b.warp_sums[lane()] : 0;
    b.before[threadIdx.x] = __reduce_add_sync(~0u, lane() < warp() ? sum : 0) + end - count;
    __syncthreads();
#pragma unroll 4
    for (uint32_t tile = warp(); tile < min(kThreads, tiles - first); tile += kWarps) {
      const uint32_t those = marks[first + tile];
      if (those >> lane() & 1)
        to[b.before[tile] + __popc(those & ((1u << lane()) - 1))] =
            range.begin + (first + tile) * kWarp + lane();
    }
    to += __reduce_add_sync(~0u, sum);
  }
}

// The entries that are listed whatever their score, around `picked` ones of the middle, and the count; one of
// `parts` pieces.
__device__ void list_ends(const HeadWork& w, uint32_t picked, uint32_t* list, uint32_t part, uint32_t parts) {
  const uint32_t first = part * kThreads + threadIdx.x;
  if (first == 0) list[0] = w.middle.begin + picked + w.entries - w.middle.end;
  for (uint32_t i = first; i < w.middle.begin; i += parts * kThreads) list[1 + i] = i;
  uint32_t* behind = list + 1 + w.middle.begin + picked;
  for (uint32_t i = first; w.middle.end + i < w.entries; i += parts * kThreads) behind[i] = w.middle.end + i;
}

__device__ uint32_t key_of(float score) { return order_bits(score); }
__device__ uint32_t key_of(uint32_t key) { return key; }

// Calls see(index, key) for each of the range; load(index) gives the score or the key, kLoads of which are
// under way at once.
template <uint32_t kLoads, typename Load, typename See>
__device__ void for_each_key(Range range, const Load& load, const See& see) {
#pragma unroll 1
  for (uint32_t start = range.begin; start < range.end; start += kLoads * kThreads) {
    decltype(load(0u)) loaded[kLoads];
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) {
      if (start + j * kThreads >= range.end) break;
      loaded[j] = load(min(start + j * kThreads + threadIdx.x, range.end - 1));
    }
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) {
      if (start + j * kThreads >= range.end) break;
      const uint32_t i = start + j * kThreads + threadIdx.x;
      if (i < range.end) see(i, key_of(loaded[j]));
    }
  }
}

// ---- where keys lie ----

// Of loads from shared memory more than one under way do not pay for the code that they take.
constexpr uint32_t kSharedLoads = 1;

struct ScoreKeys {  // in device memory
  const Scores& scores;
  __device__ uint32_t key(uint32_t i) const { return order_bits(*scores.at(i)); }
  template <uint32_t kCount>
  __device__ void get(const uint32_t (&index)[kCount], uint32_t (&key)[kCount]) const {
    float score[kCount];
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j) score[j] = *scores.at(index[j]);
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j) key[j] = order_bits(score[j]);
  }
  template <typename See>
  __device__ void for_each(Range range, const See& see) const {
    for_each_key<8>(
        range, [&](uint32_t i) { return *scores.at(i); }, see);
  }
};
struct KeptKeys {  // from `first` on `kept` of them in shared memory
  const Scores& scores;
  uint32_t* shared;
  uint32_t first, kept;
  __device__ bool keeps(uint32_t i) const { return i - first < kept; }
  __device__ uint32_t key(uint32_t i) const {
    return keeps(i) ? shared[i - first] : ScoreKeys{scores}.key(i);
  }
  template <uint32_t kCount>  // called by a warp
  __device__ void get(const uint32_t (&index)[kCount], uint32_t (&key)[kCount]) const {
    bool all = true;
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j) all = all && keeps(index[j]);
    if (__all_sync(~0u, all)) {
#pragma unroll
      for (uint32_t j = 0; j < kCount; ++j) key[j] = shared[index[j] - first];
      return;
    }
    ScoreKeys{scores}.get(index, key);
  }
  // Makes keys of the scores that this thread copied.
  __device__ void convert() const {
    for_each_key<kSharedLoads>(
        {0, kept}, [&](uint32_t i) { return __uint_as_float(shared[i]); },
        [&](uint32_t i, uint32_t key) { shared[i] = key; });
  }
  template <typename See>
  __device__ void for_each(Range own, const See& see) const {
    const uint32_t border = first + kept;
    for_each_key<kSharedLoads>(
        {first, border}, [&](uint32_t i) { return shared[i - first]; }, see);
    if (border < own.end) ScoreKeys{scores}.for_each({border, own.end}, see);
  }
};

// Counts the window's keys in the range by their bins.
template <typename Keys>
__device__ void count_keys(uint32_t* bins, const Keys& keys, Range range, Window window) {
  uint32_t last = 0;  // in the last bin: it may hold most keys
  keys.for_each(range, [&](uint32_t, uint32_t key) {
    if (!window.contains(key)) return;
    const uint32_t bin = window.bin(key);
    if (bin == kBins - 1)
      ++last;
    else
      atomicAdd(&bins[bin], 1u);
  });
  last = __reduce_add_sync(~0u, last);
  if (lane() == 0 && last) atomicAdd(&bins[kBins - 1], last);
}

// ---- a cluster or one block a head ----

// A sample of all candidates, the same in each block, tells where to look for the threshold first: the first
// kFew threads have it.
__device__ uint32_t sampled(const HeadWork& w) {
  return w.candidates.begin + uint64_t(threadIdx.x % kFew) * w.candidates.size() / kFew;
}
__device__ void put_sample(Shared& b, float score) {
  if (threadIdx.x < kFew) b.few[threadIdx.x] = uint64_t(order_bits(score)) << 32 | threadIdx.x;
}

// Fetches the keys that are kept, and samples.
__device__ void fetch_keys(Shared& b, const HeadWork& w, const KeptKeys& keys) {
  for (uint32_t i = threadIdx.x; i < keys.kept; i += kThreads)
    copy_async<4>(keys.shared + i, w.scores.at(keys.first + i));
  commit_copies();
  put_sample(b, *w.scores.at(sampled(w)));
  wait_copies<0>();
  keys.convert();
  __syncthreads();
}

// Makes the keys of votes, and samples. A vote whose key is not kept is stored at once.
__device__ void make_votes(Shared& b, const Ballot& ballot, const HeadWork& w, const KeptKeys& keys,
                           Range own, uint32_t rank, uint32_t head) {
  const uint32_t group = ballot.p.group, score_capacity = ballot.p.score_capacity, first_query = head * group;
  const float* const scores = ballot.scores + uint64_t(first_query) * score_capacity;
  float* const votes = ballot.votes + uint64_t(head) * ballot.p.vote_capacity;
  // A warp finds the log-sum-exp of one query head, whose parts are asked for before the scores.
  const uint32_t splits = ballot.sums.splits;
  const LogSum* const parts = ballot.sums.parts && warp() < group
                                  ? ballot.sums.parts + uint64_t(first_query + warp()) * splits
                                  : nullptr;
  const LogSum first = first_part(parts, parts ? splits : 0);
  bool has_lse = false;
  const auto lse = [&]() -> const float* {
    if (has_lse) return b.lse;
    has_lse = true;
    if (parts) {
      const float sum = log_sum_exp(parts, splits, first);
      if (lane() == 0) b.lse[warp()] = sum;
      if (lane() == 0 && rank == 0) ballot.lse[first_query + warp()] = sum;
    } else if (warp() < group && lane() == 0) {
      b.lse[warp()] = ballot.lse[first_query + warp()];
    }
    __syncthreads();
    return b.lse;
  };
  constexpr uint32_t kEach = 4;  // of a thread at once, and a sample
#pragma unroll 1
  for (uint32_t start = own.begin; start == own.begin || start < own.end; start += kEach * kThreads) {
    uint32_t entry[kEach + 1];
    float vote[kEach + 1];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i)
      entry[i] = min(start + i * kThreads + threadIdx.x, w.candidates.end - 1);
    entry[kEach] = threadIdx.x < kFew ? sampled(w) : entry[0];
    group_votes<kEach + 1>(scores, group, score_capacity, entry, lse, vote);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (start + i * kThreads + threadIdx.x >= own.end) break;
      if (keys.keeps(entry[i]))
        keys.shared[entry[i] - keys.first] = order_bits(vote[i]);
      else
        votes[entry[i]] = vote[i];
    }
    put_sample(b, vote[kEach]);
  }
  __syncthreads();
}

// Stores the votes whose keys are kept: last, since a barrier of the cluster would wait for them. A cluster
// stores all of its head; entries that are no candidates get -inf.
template <uint32_t kBlocks>
__device__ void store_votes(const Ballot& ballot, const HeadWork& w, const KeptKeys& keys, uint32_t rank,
                            uint32_t head) {
  float* const votes = ballot.votes + uint64_t(head) * ballot.p.vote_capacity;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < keys.kept; i += kThreads)
    votes[keys.first + i] = number_of(keys.shared[i]);
  if (rank == 0)
    for (uint32_t i = threadIdx.x; i < w.middle.begin; i += kThreads) votes[i] = -kInfinity;
  if (rank == kBlocks - 1)
    for (uint32_t i = w.middle.end + threadIdx.x; i < w.entries; i += kThreads) votes[i] = -kInfinity;
}

// The threshold of keys that compete; `own` is this block's range of them.
template <uint32_t kBlocks>
__device__ Threshold find_threshold(Shared& b, const HeadWork& w, const KeptKeys& keys, Range own,
                                    uint32_t rank) {
  Window window = sampled_window(b, w.wanted, w.candidates.size());

  Found found{0, w.wanted, 0};
  for (uint32_t pass = 0;; ++pass) {
    const uint32_t turn = pass % 2;
    count_keys(b.bins[turn], keys, own, window);
    __syncthreads();
    sum_bins<kBlocks>(b, turn, rank);
    cluster_barrier<kBlocks>();
    found = find_bin<kBlocks>(b, turn, found.wanted);
    window = found.bin < kBins ? window.within(found.bin) : Window::over(0, window.low - 1);
    if (found.bin < kBins &&
        (found.wanted == found.count || found.count <= kFew || window.low == window.high))
      break;
    if (pass > 0) {  // the others have read these bins before they came to the last barrier
      clear(b.bins[1 - turn], kBins);
      __syncthreads();
    }
  }
  if (found.wanted == found.count) return {window.low, 0};
  if (found.count <= kFew) {
    uint32_t before = 0;
#pragma unroll
    for (uint32_t r = 0; r < kBlocks; ++r) before += r < rank ? b.shares[r] : 0;
    keys.for_each(own, [&](uint32_t i, uint32_t key) {
      if (!window.contains(key)) return;
      uint64_t* const at = b.few + before + atomicAdd(&b.gathered, 1u);
#pragma unroll 1
      for (uint32_t r = 0; r < kBlocks; ++r) *of_rank<kBlocks>(at, r) = uint64_t(key) << 32 | i;
    });
    cluster_barrier<kBlocks>();
    const uint32_t larger = larger_ones(b, found.count);
    if (looked_at() < found.count && threadIdx.x % kComparing == 0 && larger == found.wanted - 1) {
      const uint64_t last = b.few[looked_at()];
      b.threshold = {static_cast<uint32_t>(last >> 32), static_cast<uint32_t>(last)};
    }
    __syncthreads();
    return b.threshold;
  }
  uint32_t tied = kBlocks - 1, wanted = found.wanted;  // the block with the last tie that is picked
  for (; b.shares[tied] < wanted; --tied) wanted -= b.shares[tied];
  if (rank == tied) {
    const uint32_t last = tie_from_end(b, keys, window.low, own, wanted);
    if (threadIdx.x < kBlocks) *of_rank<kBlocks>(&b.cut, threadIdx.x) = last;
  }
  cluster_barrier<kBlocks>();
  return {window.low, b.cut};
}

// Shared memory: Shared, a bit for each entry of the block's part, `kept` keys.
template <uint32_t kBlocks>
__global__ void THIMBLE_CLUSTER(kBlocks) __launch_bounds__(kThreads, 2)
    top_k_kernel(Operands o, uint32_t marks, uint32_t kept) {
  extern __shared__ uint32_t shared[];
  Shared& b = *reinterpret_cast<Shared*>(shared);
  uint32_t* const own_marks = shared + sizeof(Shared) / sizeof(uint32_t);
  release_successor();
  arrive_at_cluster_barrier<kBlocks>();  // blocks reach each other's memory once all have started
  clear(b.bins[0], 2 * kBins);
  if (threadIdx.x == 0) b.gathered = 0;
  const StepParams s = *o.step;
  const uint32_t rank = blockIdx.x, head = blockIdx.y;
  wait_at_cluster_barrier<kBlocks>();
  await_predecessor();
  uint32_t* const list = list_of(o, head);
  const Task t = task(o, s);
  if (t == Task::kListEverything) return list_everything(step_entries(s), list, rank, kBlocks);
  if (t == Task::kRenewLocal) {
    if (rank == 0) renew_local(s, list);
    return;
  }

  const HeadWork w = head_work(o, s, head);
  const Range own = w.candidates.part(rank, kBlocks);
  const KeptKeys keys{w.scores, own_marks + marks, own.begin, min(kept, own.size())};
  if (o.ballot.scores)
    make_votes(b, o.ballot, w, keys, own, rank, head);
  else if (w.picks_some())
    fetch_keys(b, w, keys);
  const Threshold threshold =
      w.picks_some() ? find_threshold<kBlocks>(b, w, keys, own, rank) : trivial_threshold(w);
  // Without positions a block lists entries whose keys it has.
  const Range listed = w.pos ? w.middle.part(rank, kBlocks) : own.within(w.middle);
  mark_picked(b, listed, keys, w.pos, threshold, own_marks);
  if (threadIdx.x < kBlocks) *of_rank<kBlocks>(&b.picked[rank], threadIdx.x) = b.marked;
  cluster_barrier<kBlocks>();
  uint32_t before = 0, all = 0;
#pragma unroll
  for (uint32_t r = 0; r < kBlocks; ++r) {
    if (r < rank) before += b.picked[r];
    all += b.picked[r];
  }
  write_marked(b, listed, own_marks, list + 1 + w.middle.begin + before);
  list_ends(w, all, list, rank, kBlocks);
  if (o.ballot.scores) store_votes<kBlocks>(o.ballot, w, keys, rank, head);
}

// ---- several blocks a head ----

// How many: a multiprocessor takes two at once, or more. Each block adds up the histograms of all, so more
// than 16 would not pay: of 131,072 keys a block then reads 32 KiB, and 128 KiB of histograms from the
// second-level cache.
uint32_t blocks_of_head(const Card& card, uint32_t heads) {
  return std::clamp(2 * card.multiprocessors / heads, 1u, 16u);
}

// The window that the passes so far leave.
struct Known {
  Window window;
  uint32_t wanted;  // of its keys
};

struct Scratch {
  uint32_t* histograms;  // [2][heads][parts][kBins]: of an even and an odd pass
  Known* known;          // [kPasses - 1][heads] after a pass
  uint32_t* totals;      // [heads][parts]: one more than a part picked; 0: not known yet
  uint32_t* ticket;      // blocks that have started
  uint32_t heads, parts;
  uint64_t bytes;

  Scratch(std::byte* base, uint32_t n_heads, uint32_t n_parts) : heads(n_heads), parts(n_parts) {
    uint64_t end = 0;
    const auto place = [&](uint64_t size) {
      std::byte* at = base + end;
      end += round_up(size, 256);
      return at;
    };
    histograms = reinterpret_cast<uint32_t*>(place(uint64_t(2) * heads * parts * kBins * sizeof(uint32_t)));
    known = reinterpret_cast<Known*>(place(uint64_t(kPasses - 1) * heads * sizeof(Known)));
    totals = reinterpret_cast<uint32_t*>(place(uint64_t(heads) * parts * sizeof(uint32_t)));
    ticket = reinterpret_cast<uint32_t*>(place(sizeof(uint32_t)));
    bytes = end;
  }
  __device__ uint32_t* histogram(uint32_t pass, uint32_t head, uint32_t part) const {
    return histograms + ((uint64_t(pass % 2) * heads + head) * parts + part) * kBins;
  }
};

// What is known once the kernel before this one has counted for `pass`; b.found is that pass's bin.
__device__ Known narrowed(Shared& b, const Scratch& scratch, const HeadWork& w, uint32_t head,
                          uint32_t pass) {
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) {
    uint32_t sum = 0;
#pragma unroll 8
    for (uint32_t part = 0; part < scratch.parts; ++part) sum += scratch.histogram(pass, head, part)[bin];
    b.bins[0][bin] = sum;
  }
  __syncthreads();
  sum_bins<1>(b, 0, 0);
  __syncthreads();
  const Known before =
      pass ? scratch.known[(pass - 1) * scratch.heads + head] : Known{Window::over(0, ~0u), w.wanted};
  const Found found = find_bin<1>(b, 0, before.wanted);
  return {before.window.within(found.bin), found.wanted};
}

// Counts the keys of the window that is left; a part of the candidates of a head a block.
__global__ void __launch_bounds__(kThreads) count_kernel(Operands o, Scratch scratch, uint32_t pass) {
  begin_kernel();
  __shared__ Shared b;
  const uint32_t part = blockIdx.x, head = blockIdx.y;
  const StepParams s = *o.step;
  if (task(o, s) != Task::kPick) return;
  if (pass == 0 && part == 0) {  // for list_kernel
    if (threadIdx.x < scratch.parts) scratch.totals[head * scratch.parts + threadIdx.x] = 0;
    if (head == 0 && threadIdx.x == 0) *scratch.ticket = 0;
  }
  if (head > 0 && shares_threshold(o, s)) return;
  const HeadWork w = head_work(o, s, head);
  if (!w.picks_some()) return;
  Window window = Window::over(0, ~0u);
  if (pass > 0) {
    const Known known = narrowed(b, scratch, w, head, pass - 1);
    window = known.window;
    if (part == 0 && threadIdx.x == 0) scratch.known[(pass - 1) * scratch.heads + head] = known;
  }
  __syncthreads();
  clear(b.bins[0], kBins);
  __syncthreads();
  count_keys(b.bins[0], ScoreKeys{w.scores}, w.candidates.part(part, scratch.parts), window);
  __syncthreads();
  uint32_t* to = scratch.histogram(pass, head, part);
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) to[bin] = b.bins[0][bin];
}

// From the counts of all passes.
__device__ Threshold find_threshold(Shared& b, const Scratch& scratch, const HeadWork& w, uint32_t head) {
  const Known known = narrowed(b, scratch, w, head, kPasses - 1);
  const uint32_t key = known.window.low;
  uint32_t wanted = known.wanted;
  if (wanted == b.found.count) return {key, 0};
  uint32_t part = scratch.parts - 1;  // the one with the last tie that is picked
  for (;; --part) {
    const uint32_t ties = scratch.histogram(kPasses - 1, head, part)[b.found.bin];
    if (wanted <= ties) break;
    wanted -= ties;
  }
  const Range range = w.candidates.part(part, scratch.parts);
  return {key, tie_from_end(b, ScoreKeys{w.scores}, key, range, wanted)};
}

// Writes the lists; a part of the entries of a head a block, and in shared memory a bit for each of them.
__global__ void __launch_bounds__(kThreads) list_kernel(Operands o, Scratch scratch) {
  begin_kernel();
  __shared__ Shared b;
  extern __shared__ uint32_t shared[];
  const StepParams s = *o.step;
  const Task t = task(o, s);
  if (t != Task::kPick) {
    const uint32_t part = blockIdx.x % scratch.parts;
    uint32_t* list = list_of(o, blockIdx.x / scratch.parts);
    if (t == Task::kListEverything) list_everything(step_entries(s), list, part, scratch.parts);
    if (t == Task::kRenewLocal && part == 0) renew_local(s, list);
    return;
  }
  // Blocks take their parts in the order in which they start, so a block waits only for some that run.
  if (threadIdx.x == 0) b.number = atomicAdd(scratch.ticket, 1u);
  __syncthreads();
  const uint32_t head = b.number / scratch.parts, part = b.number % scratch.parts;
  __syncthreads();

  const HeadWork w = head_work(o, s, head);
  const Threshold threshold = w.picks_some()
                                  ? find_threshold(b, scratch, w, shares_threshold(o, s) ? 0 : head)
                                  : trivial_threshold(w);
  const Range own = w.middle.part(part, scratch.parts);
  mark_picked(b, own, ScoreKeys{w.scores}, w.pos, threshold, shared);
  volatile uint32_t* totals = scratch.totals + head * scratch.parts;
  if (threadIdx.x == 0) totals[part] = b.marked + 1;
  if (warp() == 0) {
    uint32_t total = 1;
    if (lane() < part)
      while ((total = totals[lane()]) == 0) {
      }
    const uint32_t before = __reduce_add_sync(~0u, total - 1);
    if (lane() == 0) b.number = before;
  }
  __syncthreads();
  const uint32_t before = b.number;
  uint32_t* list = list_of(o, head);
  write_marked(b, own, shared, list + 1 + w.middle.begin + before);
  if (part == scratch.parts - 1) list_ends(w, before + b.marked, list, 0, 1);
}

// ---- recording ----

// Words of marks that a block needs which lists one of `parts` pieces of a head's entries.
uint32_t mark_words(uint64_t entries, uint32_t parts) {
  return static_cast<uint32_t>(ceil_div(entries, parts * kWarp));
}

// Bytes of shared memory, all keys among them.
uint64_t shared_bytes(uint64_t candidates, uint32_t ranks) {
  const uint32_t words = mark_words(candidates, ranks);
  return sizeof(Shared) + words * (sizeof(uint32_t) + kWarp * sizeof(uint32_t));
}
// The same, as far as a block can have it: keys that find no room are read anew.
uint64_t shared_bytes(const Card& card, uint64_t candidates, uint32_t ranks) {
  return std::min<uint64_t>(shared_bytes(candidates, ranks), card.shared_bytes);
}
bool one_kernel(const Card& card, uint64_t candidates) {
  return card.major >= 9 || shared_bytes(candidates, 1) <= card.shared_bytes;
}

// Whether the card runs so many clusters at once, of blocks with so much shared memory.
template <uint32_t kBlocks>
bool clusters_fit(const Launch& l, uint64_t bytes, uint32_t clusters) {
  const auto kernel = top_k_kernel<kBlocks>;
  // Not every card can have clusters of more than 8 blocks, and a kernel has to ask for them.
  if ((kBlocks > 8 &&
       cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) ||
      allow_shared(reinterpret_cast<const void*>(kernel), bytes) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocks, clusters);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = bytes;
  config.stream = l.stream;
  cudaLaunchAttribute dimension{};
  dimension.id = cudaLaunchAttributeClusterDimension;
  dimension.val.clusterDim = {kBlocks, 1, 1};
  config.attrs = &dimension;
  config.numAttrs = 1;
  int fit = 0;
  if (cudaOccupancyMaxActiveClusters(&fit, kernel, &config) == cudaSuccess)
    return fit >= static_cast<int>(clusters);
  cudaGetLastError();
  return false;
}

template <uint32_t kBlocks>
void launch_one_kernel(const Launch& l, const Operands& o, uint32_t candidates) {
  const uint32_t marks = mark_words(candidates, kBlocks);
  uint64_t bytes = shared_bytes(l.card, candidates, kBlocks);
  const uint64_t kept = (bytes - sizeof(Shared)) / sizeof(uint32_t) - marks;
  // Two of a cluster's blocks on one multiprocessor take 13 us for a list from 16,740 entries, on two they
  // take 10: where there is room for it, a block asks for more than half of the shared memory.
  const uint64_t alone = std::max<uint64_t>(bytes, l.card.shared_bytes / 2 + 1024);
  if (kBlocks > 1 && kBlocks * o.p.heads <= l.card.multiprocessors &&
      clusters_fit<kBlocks>(l, alone, o.p.heads))
    bytes = alone;
  launch(l, top_k_kernel<kBlocks>, dim3(kBlocks, o.p.heads), kThreads, bytes, o, marks,
         static_cast<uint32_t>(kept));
}

}  // namespace

bool can_vote(const Launch& l, const VoteParams& p) {
  // One block a head would take longer for its votes than a launch takes.
  return l.vote_scope == kVoteGroup && p.window <= 1 && p.group <= kMostVoters && l.card.major >= 9;
}

void top_k(const Launch& l, const TopK& op, const Vote* vote, const TokenScore* scored) {
  const TopKParams& p = op.p;
  Operands o{l.step,
             data<float>(op.scores),
             data<float>(op.chunk_scores),
             data<int32_t>(op.pos),
             data<GateState>(op.gate),
             data<uint32_t>(op.list),
             p,
             {}};
  if (vote) {
    o.ballot = {data<float>(vote->scores), data<float>(vote->lse), data<float>(vote->votes), vote->p, {}};
    if (scored) o.ballot.sums = score_parts(l, scored->p);
  }
  // Votes of a layer are as many as positions, those of a KV head as many as entries.
  const uint32_t candidates = p.purpose == kTopKRetain     ? p.list_capacity - 1
                              : l.vote_scope == kVoteGroup ? p.pos_capacity
                                                           : std::max(p.score_capacity, p.pos_capacity);
  if (l.card.major >= 9) {
    const bool many = candidates > kManyCandidates &&
                      clusters_fit<kMostRanks>(l, shared_bytes(l.card, candidates, kMostRanks), p.heads);
    return many ? launch_one_kernel<kMostRanks>(l, o, candidates)
                : launch_one_kernel<kRanks>(l, o, candidates);
  }
  if (one_kernel(l.card, candidates)) return launch_one_kernel<1>(l, o, candidates);
  const Scratch scratch(l.scratch, p.heads, blocks_of_head(l.card, p.heads));
  for (uint32_t pass = 0; pass < kPasses; ++pass)
    launch(l, count_kernel, dim3(scratch.parts, p.heads), kThreads, 0, o, scratch, pass);
  launch(l, list_kernel, scratch.parts * p.heads, kThreads,
         mark_words(candidates, scratch.parts) * sizeof(uint32_t), o, scratch);
}

uint64_t top_k_scratch(const ModelShape& model, const SessionShape& session, const Card& card) {
  const uint64_t candidates =
      std::max<uint64_t>(uint64_t(session.pool_capacity) + session.chunk, session.positions);
  if (one_kernel(card, candidates)) return 0;
  return Scratch(nullptr, model.kv_heads, blocks_of_head(card, model.kv_heads)).bytes;
}

}  // namespace thimble::cuda
