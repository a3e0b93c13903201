// The search for what a head's list is picked by: counts of the keys in ever narrower windows find the lowest
// key that is picked. Device side; all threads of a block call these.
#pragma once

#include "backends/cuda/cluster.cuh"
#include "backends/cuda/order.cuh"
#include "backends/cuda/select/top_k_work.cuh"

namespace thimble::cuda::topk {

// Three windows, of 2^32, 2^21 and 2^10 keys, find any key, with counts that shared memory holds easily.
inline constexpr uint32_t kPasses = 3, kBinBits = 11, kBins = 1 << kBinBits;
inline constexpr uint32_t kCoarse = kBins / kWarp;  // sums of 32 bins each
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

inline constexpr uint32_t kMostVoters = kWarps;  // query heads to a KV head
inline constexpr uint32_t kMostRanks = 16;       // blocks of a cluster

// So many keys are compared each with each, a thread with 8 of them.
inline constexpr uint32_t kFew = 64, kComparing = kThreads / kFew;

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

__device__ inline uint32_t lane() { return threadIdx.x % kWarp; }
__device__ inline uint32_t warp() { return threadIdx.x / kWarp; }

// x of this lane and of those before it.
__device__ inline uint32_t scan(uint32_t x) {
#pragma unroll
  for (uint32_t offset = 1; offset < kWarp; offset *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, x, offset);
    if (lane() >= offset) x += other;
  }
  return x;
}

__device__ inline void clear(uint32_t* bins, uint32_t count) {
  for (uint32_t i = threadIdx.x; i < count / 4; i += kThreads)
    reinterpret_cast<uint4*>(bins)[i] = {0, 0, 0, 0};
}

// ---- where keys lie ----

__device__ inline uint32_t key_of(float score) { return order_bits(score); }
__device__ inline uint32_t key_of(uint32_t key) { return key; }

// Calls see(index, key) for each of the range; load(index) gives the score or the key, kLoads of which are
// under way at once.
template <uint32_t kLoads, typename Load, typename See>
__device__ inline void for_each_key(Range range, const Load& load, const See& see) {
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

// Of loads from shared memory more than one under way do not pay for the code that they take.
inline constexpr uint32_t kSharedLoads = 1;

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
__device__ inline void count_keys(uint32_t* bins, const Keys& keys, Range range, Window window) {
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

// ---- the search ----

// Tells all blocks the sums of this one's bins.
template <uint32_t kBlocks>
__device__ inline void sum_bins(Shared& b, uint32_t turn, uint32_t rank) {
#pragma unroll
  for (uint32_t i = warp(); i < kCoarse; i += kWarps) {
    const uint32_t sum = __reduce_add_sync(~0u, b.bins[turn][i * kWarp + lane()]);
    if (lane() < kBlocks) *of_rank<kBlocks>(&b.coarse[turn][rank][i], lane()) = sum;
  }
}

// The bin of the wanted-th largest of the keys that the blocks counted. A warp looks for it among the sums,
// then in the bins of one.
template <uint32_t kBlocks>
__device__ inline Found find_bin(Shared& b, uint32_t turn, uint32_t wanted) {
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
__device__ inline uint32_t looked_at() { return threadIdx.x / kComparing; }
__device__ inline uint32_t larger_ones(const Shared& b, uint32_t count) {
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
__device__ inline Window sampled_window(Shared& b, uint32_t wanted, uint32_t all) {
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
__device__ inline uint32_t tie_from_end(Shared& b, const Keys& keys, uint32_t bits, Range range,
                                        uint32_t wanted) {
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
__device__ inline Threshold trivial_threshold(const HeadWork& w) {
  return w.wanted == 0 ? Threshold{~0u, ~0u} : Threshold{0, 0};
}

}  // namespace thimble::cuda::topk
