// Finds the threshold of a head's list: counts of keys in ever narrower windows lead to the lowest key that
// is picked. Device side; all threads of a block call these functions.
#pragma once

#include "backends/cuda/cluster.cuh"
#include "backends/cuda/order.cuh"
#include "backends/cuda/select/top_k_work.cuh"

namespace thimble::cuda::topk {

// Three windows, of 2^32, 2^21 and 2^10 keys, find any key; their counts easily fit shared memory.
inline constexpr uint32_t kPasses = 3, kBinBits = 11, kBins = 1 << kBinBits;
inline constexpr uint32_t kCoarse = kBins / kWarp;  // sums of 32 bins each
static_assert(kCoarse == 2 * kWarp, "a lane looks at two sums");

// Consecutive keys in bins of 2^shift each; the last bin also covers all keys up to `high`.
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
  uint32_t wanted;  // how many of the keys in this bin, or below all bins, are picked
  uint32_t count;   // keys in the bin
};

// The threshold of a head's list.
struct Threshold {
  uint32_t lowest;  // the lowest key that is picked
  uint32_t cut;     // the first index that is picked among the keys equal to `lowest`
  __device__ bool picks(uint32_t key, uint32_t index) const {
    return key > lowest || (key == lowest && index >= cut);
  }
};

inline constexpr uint32_t kMostVoters = kWarps;  // query heads per KV head
inline constexpr uint32_t kMostRanks = 16;       // blocks per cluster

// Up to kFew keys are all compared with each other; kComparing threads compare the same key with 8 keys each.
inline constexpr uint32_t kFew = 64, kComparing = kThreads / kFew;

struct alignas(16) Shared {
  uint32_t bins[2][kBins];                  // used in turn
  uint32_t coarse[2][kMostRanks][kCoarse];  // sums of all blocks' bins
  uint64_t few[kFew];                       // key << 32 | index
  uint32_t gathered;                        // how many of them this block gathered
  uint32_t warp_sums[kWarps];
  uint32_t before[kThreads];
  Found found;
  uint32_t shares[kMostRanks];  // the blocks' counts
  uint32_t bounds[2];           // samples that bound the first window
  Threshold threshold;
  uint32_t cut;                 // the last tie that is picked
  uint32_t marked;              // entries that this block lists
  uint32_t picked[kMostRanks];  // the same for all blocks of the cluster
  float lse[kMostVoters];
  uint32_t number;  // a value that one thread passes to the others
};

__device__ inline uint32_t lane() { return threadIdx.x % kWarp; }
__device__ inline uint32_t warp() { return threadIdx.x / kWarp; }

// Inclusive prefix sum of x over the lanes of a warp.
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

// ---- the keys of a head ----

__device__ inline uint32_t key_of(float score) { return order_bits(score); }
__device__ inline uint32_t key_of(uint32_t key) { return key; }

// Calls see(index, key) for each index of the range; load(index) returns the score or the key. kLoads loads
// are in flight at once.
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

// More than one load from shared memory in flight does not pay for the code it takes.
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
struct KeptKeys {  // `kept` of them, from `first` on, in shared memory
  const Scores& scores;
  uint32_t* shared;
  uint32_t first, kept;
  __device__ bool keeps(uint32_t i) const { return i - first < kept; }
  __device__ uint32_t key(uint32_t i) const {
    return keeps(i) ? shared[i - first] : ScoreKeys{scores}.key(i);
  }
  template <uint32_t kCount>  // a warp calls this
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
  // Converts the scores that this thread copied to keys.
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

// Counts the window's keys in the range by bin.
template <typename Keys>
__device__ inline void count_keys(uint32_t* bins, const Keys& keys, Range range, Window window) {
  uint32_t last = 0;  // count of the last bin, which may get most keys
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

// Sends the sums of this block's bins to all blocks.
template <uint32_t kBlocks>
__device__ inline void sum_bins(Shared& b, uint32_t turn, uint32_t rank) {
#pragma unroll
  for (uint32_t i = warp(); i < kCoarse; i += kWarps) {
    const uint32_t sum = __reduce_add_sync(~0u, b.bins[turn][i * kWarp + lane()]);
    if (lane() < kBlocks) *of_rank<kBlocks>(&b.coarse[turn][rank][i], lane()) = sum;
  }
}

// The bin of the wanted-th largest of the keys that the blocks counted. A warp finds it first among the sums,
// then among the bins of one sum.
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

// looked_at() is the key of b.few that this thread compares. larger_ones() counts how many of the first
// `count` are larger.
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

// The first window to search for the key that is number `wanted` of `all`. b.few holds kFew samples. The
// window's bins cover the range between two samples that most likely enclose the key; at the ends, where
// there is no such sample, they extend as far again as the two are apart. If 2,048 of 131,072 keys are
// picked, 9 % of the keys are in the window and about 10 in the key's bin, whatever their distribution.
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

// The threshold if no score needs to be compared.
__device__ inline Threshold trivial_threshold(const HeadWork& w) {
  return w.wanted == 0 ? Threshold{~0u, ~0u} : Threshold{0, 0};
}

}  // namespace thimble::cuda::topk
