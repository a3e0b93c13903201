// top_k: scores become ascending lists. A radix select finds the lowest key that is picked, ordered scans
// write the lists.
#include <algorithm>

#include "backends/cuda/cluster.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/order.cuh"

namespace thimble::cuda {
namespace {

// From Hopper on a cluster of 8 blocks a head, with the keys in its shared memory. On other cards one block a
// head while the keys fit there, else several blocks a head and four kernels. A block is small enough to
// start beside the kernel before.
constexpr uint32_t kThreads = 512, kWarps = kThreads / kWarp;
constexpr uint32_t kMostRanks = 8;  // blocks of a cluster

// A key's digits from the top have 11, 11 and 10 bits: three passes, and counts that shared memory holds
// easily.
constexpr uint32_t kDigits = 3, kBins = 2048;
constexpr uint32_t kCoarse = kBins / kWarp;  // sums of 32 bins each
static_assert(kCoarse == 2 * kWarp, "a lane looks at two sums");
__device__ uint32_t digit_shift(uint32_t digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
__device__ uint32_t digit_of(uint32_t key, uint32_t digit) {
  return key >> digit_shift(digit) & (digit == kDigits - 1 ? 1023 : 2047);
}
// Whether a key has the digits of `bits` before `digit`.
__device__ bool shares_digits(uint32_t key, uint32_t bits, uint32_t digit) {
  return digit == 0 || (key ^ bits) >> digit_shift(digit - 1) == 0;
}

struct Operands {
  const StepParams* step;
  const float *scores, *chunk_scores;
  const int32_t* pos;
  const GateState* gate;
  uint32_t* list;
  TopKParams p;
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
  return {
      n, middle, positions, s.select_k, {o.scores, o.scores, 0}, o.pos + uint64_t(head) * o.p.pos_capacity};
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

struct Digit {
  uint32_t digit;
  uint32_t wanted;  // of the keys with this digit, how many are picked
  uint32_t count;   // and how many there are
};

struct Histogram {
  uint32_t bins[kBins], coarse[kCoarse];
};

struct alignas(16) Shared {
  Histogram histograms[kDigits];
  uint32_t warp_sums[kWarps];
  uint32_t before[kThreads];
  Digit digit;
  uint32_t ties[kMostRanks];    // the blocks' shares of its count
  uint32_t cut;                 // the last tie that is picked
  uint32_t marked;              // entries that this block lists
  uint32_t picked[kMostRanks];  // and all of the cluster
  uint32_t number;              // whatever one thread tells the others
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

template <uint32_t kCount>
__device__ void clear(Histogram (&h)[kCount]) {
  uint4* const words = reinterpret_cast<uint4*>(h);
  for (uint32_t i = threadIdx.x; i < sizeof h / sizeof(uint4); i += kThreads) words[i] = {0, 0, 0, 0};
}

__device__ void sum_bins(Histogram& h) {
  for (uint32_t i = warp(); i < kCoarse; i += kWarps) {
    const uint32_t sum = __reduce_add_sync(~0u, h.bins[i * kWarp + lane()]);
    if (lane() == 0) h.coarse[i] = sum;
  }
}

// The digit of the wanted-th largest key, from the histograms of kRanks blocks. There are at least as many
// keys. A warp looks for it among the sums, then in the bins of one.
template <uint32_t kRanks>
__device__ Digit find_digit(Shared& b, Histogram& own, uint32_t wanted) {
  if (warp() == 0) {
    uint2 sums[kRanks];
#pragma unroll
    for (uint32_t r = 0; r < kRanks; ++r)  // descending with lanes
      sums[r] = *of_rank<kRanks>(reinterpret_cast<uint2*>(own.coarse) + kWarp - 1 - lane(), r);
    uint32_t high = 0, low = 0;
#pragma unroll
    for (uint32_t r = 0; r < kRanks; ++r) {
      low += sums[r].x;
      high += sums[r].y;
    }
    const uint32_t end = scan(high + low), before = end - high - low;
    const bool is_high = wanted <= before + high;
    const uint32_t finder = __ffs(__ballot_sync(~0u, wanted <= end)) - 1;  // the first lane that reaches it
    const uint32_t coarse = __shfl_sync(~0u, kCoarse - 1 - 2 * lane() - !is_high, finder);
    const uint32_t left = wanted - __shfl_sync(~0u, is_high ? before : before + high, finder);

    const uint32_t bin = coarse * kWarp + kWarp - 1 - lane();
    uint32_t counts[kRanks], count = 0;
#pragma unroll
    for (uint32_t r = 0; r < kRanks; ++r) counts[r] = *of_rank<kRanks>(own.bins + bin, r);
#pragma unroll
    for (uint32_t r = 0; r < kRanks; ++r) count += counts[r];
    const uint32_t reached = scan(count);
    if (reached - count < left && left <= reached) {
      b.digit = {bin, left - (reached - count), count};
#pragma unroll
      for (uint32_t r = 0; r < kRanks; ++r) b.ties[r] = counts[r];
    }
  }
  __syncthreads();
  return b.digit;
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

// What a head's list is picked by.
struct Threshold {
  uint32_t lowest;  // key
  uint32_t cut;     // of the keys equal to it, the first index
  __device__ bool picks(uint32_t key, uint32_t index) const {
    return key > lowest || (key == lowest && index >= cut);
  }
};

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
  constexpr uint32_t kLoads = 8;  // under way at once
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

// Counts the keys of the range that have the digits of `bits` before `digit` by that digit; `see` gets each
// key and its index.
template <typename Keys, typename See>
__device__ void count_digits(Histogram& h, const Keys& keys, Range range, uint32_t bits, uint32_t digit,
                             const See& see) {
  constexpr uint32_t kLoads = 16;  // under way at once
#pragma unroll 1
  for (uint32_t start = range.begin; start < range.end; start += kLoads * kThreads) {
    uint32_t loaded[kLoads];
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) {
      if (start + j * kThreads >= range.end) break;
      loaded[j] = keys.load(min(start + j * kThreads + threadIdx.x, range.end - 1));
    }
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) {
      if (start + j * kThreads >= range.end) break;
      const uint32_t i = start + j * kThreads + threadIdx.x, key = keys.key_of(loaded[j]);
      if (i >= range.end) continue;
      see(i, key);
      if (shares_digits(key, bits, digit)) atomicAdd(&h.bins[digit_of(key, digit)], 1u);
    }
  }
}

// ---- where keys lie: load() what key_of() makes the key of, so that many loads are under way before the
// first is needed ----

struct ScoreKeys {  // in device memory
  const Scores& scores;
  __device__ uint32_t load(uint32_t i) const { return __float_as_uint(*scores.at(i)); }
  __device__ static uint32_t key_of(uint32_t loaded) { return order_bits(__uint_as_float(loaded)); }
  __device__ uint32_t key(uint32_t i) const { return key_of(load(i)); }
  template <uint32_t kCount>
  __device__ void get(const uint32_t (&index)[kCount], uint32_t (&key)[kCount]) const {
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j) key[j] = load(index[j]);
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j) key[j] = key_of(key[j]);
  }
};
struct SharedKeys {  // ready in shared memory
  const uint32_t* keys;
  __device__ uint32_t load(uint32_t i) const { return keys[i]; }
  __device__ static uint32_t key_of(uint32_t loaded) { return loaded; }
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
};

// ---- a cluster or one block a head ----

// The first kept of the block's keys, then the others.
__device__ void count_digits(Histogram& h, const KeptKeys& keys, Range own, uint32_t bits, uint32_t digit) {
  const auto ignore = [](uint32_t, uint32_t) {};
  count_digits(h, SharedKeys{keys.shared}, Range{0, keys.kept}, bits, digit, ignore);
  if (keys.kept < own.size())
    count_digits(h, ScoreKeys{keys.scores}, Range{own.begin + keys.kept, own.end}, bits, digit, ignore);
}

// Shared memory: Shared, a bit for each entry of the block's part, `kept` keys.
template <uint32_t kRanks>
__global__ void THIMBLE_CLUSTER(kRanks) __launch_bounds__(kThreads)
    top_k_kernel(Operands o, uint32_t marks, uint32_t kept) {
  extern __shared__ uint32_t shared[];
  Shared& b = *reinterpret_cast<Shared*>(shared);
  uint32_t* const own_marks = shared + sizeof(Shared) / sizeof(uint32_t);
  release_successor();
  clear(b.histograms);
  await_predecessor();
  const uint32_t rank = blockIdx.x, head = blockIdx.y;
  const StepParams s = *o.step;
  uint32_t* const list = list_of(o, head);
  const Task t = task(o, s);
  if (t == Task::kListEverything) return list_everything(step_entries(s), list, rank, kRanks);
  if (t == Task::kRenewLocal) {
    if (rank == 0) renew_local(s, list);
    return;
  }
  __syncthreads();

  const HeadWork w = head_work(o, s, head);
  const Range own = w.candidates.part(rank, kRanks);
  const KeptKeys keys{w.scores, own_marks + marks, own.begin, min(kept, own.size())};
  Threshold threshold = trivial_threshold(w);
  if (w.picks_some()) {
    uint32_t bits = 0;
    Digit found{0, w.wanted, 0};
    for (uint32_t digit = 0;; ++digit) {
      if (digit == 0)
        count_digits(b.histograms[0], ScoreKeys{w.scores}, own, bits, 0, [&](uint32_t i, uint32_t key) {
          if (i - keys.first < keys.kept) keys.shared[i - keys.first] = key;
        });
      else
        count_digits(b.histograms[digit], keys, own, bits, digit);
      __syncthreads();
      sum_bins(b.histograms[digit]);
      cluster_barrier<kRanks>();
      found = find_digit<kRanks>(b, b.histograms[digit], found.wanted);
      bits |= found.digit << digit_shift(digit);
      if (found.wanted == found.count || digit == kDigits - 1)
        break;  // so few keys that all are picked, or equal ones
    }
    uint32_t cut = 0;
    if (found.wanted < found.count) {
      uint32_t tied = kRanks - 1, wanted = found.wanted;  // the block with the last tie that is picked
      for (; b.ties[tied] < wanted; --tied) wanted -= b.ties[tied];
      if (rank == tied) {
        const uint32_t last = tie_from_end(b, keys, bits, own, wanted);
        if (threadIdx.x < kRanks) *of_rank<kRanks>(&b.cut, threadIdx.x) = last;
      }
      cluster_barrier<kRanks>();
      cut = b.cut;
    }
    threshold = {bits, cut};
  } else {
    cluster_barrier<kRanks>();  // every block has started
  }
  const Range listed = w.middle.part(rank, kRanks);
  mark_picked(b, listed, keys, w.pos, threshold, own_marks);
  if (threadIdx.x < kRanks) *of_rank<kRanks>(&b.picked[rank], threadIdx.x) = b.marked;
  cluster_barrier<kRanks>();
  uint32_t before = 0, all = 0;
#pragma unroll
  for (uint32_t r = 0; r < kRanks; ++r) {
    if (r < rank) before += b.picked[r];
    all += b.picked[r];
  }
  write_marked(b, listed, own_marks, list + 1 + w.middle.begin + before);
  list_ends(w, all, list, rank, kRanks);
}

// ---- several blocks a head ----

// How many: a multiprocessor takes two at once, or more. Each block adds up the histograms of all, so more
// than 16 would not pay: of 131,072 keys a block then reads 32 KiB, and 128 KiB of histograms from the
// second-level cache.
uint32_t blocks_of_head(const Card& card, uint32_t heads) {
  return std::clamp(2 * card.multiprocessors / heads, 1u, 16u);
}

struct Scratch {
  uint32_t* histograms;  // [2][heads][parts][kBins]: of an even and an odd digit
  uint2* found;          // [kDigits - 1][heads]{bits, wanted} after a digit
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
    found = reinterpret_cast<uint2*>(place(uint64_t(kDigits - 1) * heads * sizeof(uint2)));
    totals = reinterpret_cast<uint32_t*>(place(uint64_t(heads) * parts * sizeof(uint32_t)));
    ticket = reinterpret_cast<uint32_t*>(place(sizeof(uint32_t)));
    bytes = end;
  }
  __device__ uint32_t* histogram(uint32_t digit, uint32_t head, uint32_t part) const {
    return histograms + ((uint64_t(digit % 2) * heads + head) * parts + part) * kBins;
  }
};

// The digits up to `digit`, which the kernel before this one counted.
struct Found {
  uint32_t bits;
  Digit last;
};
__device__ Found find_digits(Shared& b, const Scratch& scratch, const HeadWork& w, uint32_t head,
                             uint32_t digit) {
  Histogram& all = b.histograms[0];
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) {
    uint32_t sum = 0;
#pragma unroll 8
    for (uint32_t part = 0; part < scratch.parts; ++part) sum += scratch.histogram(digit, head, part)[bin];
    all.bins[bin] = sum;
  }
  __syncthreads();
  sum_bins(all);
  __syncthreads();
  const uint2 before = digit ? scratch.found[(digit - 1) * scratch.heads + head] : make_uint2(0, w.wanted);
  const Digit found = find_digit<1>(b, all, before.y);
  return {before.x | found.digit << digit_shift(digit), found};
}

// Counts one digit of the keys that share those before it; a part of the candidates of a head a block.
__global__ void __launch_bounds__(kThreads) count_kernel(Operands o, Scratch scratch, uint32_t digit) {
  begin_kernel();
  __shared__ Shared b;
  const uint32_t part = blockIdx.x, head = blockIdx.y;
  const StepParams s = *o.step;
  if (task(o, s) != Task::kPick) return;
  if (digit == 0 && part == 0) {  // for list_kernel
    if (threadIdx.x < scratch.parts) scratch.totals[head * scratch.parts + threadIdx.x] = 0;
    if (head == 0 && threadIdx.x == 0) *scratch.ticket = 0;
  }
  if (head > 0 && shares_threshold(o, s)) return;
  const HeadWork w = head_work(o, s, head);
  if (!w.picks_some()) return;
  uint32_t bits = 0;
  if (digit > 0) {
    const Found found = find_digits(b, scratch, w, head, digit - 1);
    bits = found.bits;
    if (part == 0 && threadIdx.x == 0)
      scratch.found[(digit - 1) * scratch.heads + head] = make_uint2(bits, found.last.wanted);
  }
  __syncthreads();
  clear(b.histograms);
  __syncthreads();
  Histogram& own = b.histograms[0];
  count_digits(own, ScoreKeys{w.scores}, w.candidates.part(part, scratch.parts), bits, digit,
               [](uint32_t, uint32_t) {});
  __syncthreads();
  uint32_t* to = scratch.histogram(digit, head, part);
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) to[bin] = own.bins[bin];
}

// From the counts of all digits.
__device__ Threshold find_threshold(Shared& b, const Scratch& scratch, const HeadWork& w, uint32_t head) {
  const Found found = find_digits(b, scratch, w, head, kDigits - 1);
  uint32_t wanted = found.last.wanted;
  if (wanted == found.last.count) return {found.bits, 0};
  uint32_t part = scratch.parts - 1;  // the one with the last tie that is picked
  for (;; --part) {
    const uint32_t ties = scratch.histogram(kDigits - 1, head, part)[found.last.digit];
    if (wanted <= ties) break;
    wanted -= ties;
  }
  const Range range = w.candidates.part(part, scratch.parts);
  return {found.bits, tie_from_end(b, ScoreKeys{w.scores}, found.bits, range, wanted)};
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
bool one_kernel(const Card& card, uint64_t candidates) {
  return card.major >= 9 || shared_bytes(candidates, 1) <= card.shared_bytes;
}

template <uint32_t kRanks>
void launch_one_kernel(const Launch& l, const Operands& o, uint32_t candidates) {
  const uint64_t bytes = std::min<uint64_t>(shared_bytes(candidates, kRanks), l.card.shared_bytes);
  const uint32_t marks = mark_words(candidates, kRanks);
  const uint64_t kept = (bytes - sizeof(Shared)) / sizeof(uint32_t) - marks;
  launch(l, top_k_kernel<kRanks>, dim3(kRanks, o.p.heads), kThreads, bytes, o, marks,
         static_cast<uint32_t>(kept));
}

}  // namespace

void top_k(const Launch& l, const TopK& op) {
  const TopKParams& p = op.p;
  const Operands o{l.step,
                   data<float>(op.scores),
                   data<float>(op.chunk_scores),
                   data<int32_t>(op.pos),
                   data<GateState>(op.gate),
                   data<uint32_t>(op.list),
                   p};
  const uint32_t candidates =
      p.purpose == kTopKRetain ? p.list_capacity - 1 : std::max(p.score_capacity, p.pos_capacity);
  if (l.card.major >= 9) return launch_one_kernel<kMostRanks>(l, o, candidates);
  if (one_kernel(l.card, candidates)) return launch_one_kernel<1>(l, o, candidates);
  const Scratch scratch(l.scratch, p.heads, blocks_of_head(l.card, p.heads));
  for (uint32_t digit = 0; digit < kDigits; ++digit)
    launch(l, count_kernel, dim3(scratch.parts, p.heads), kThreads, 0, o, scratch, digit);
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
