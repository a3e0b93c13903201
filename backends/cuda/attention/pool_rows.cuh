// How decode attention reads a pool: a few adjacent lanes share a row, and every warp streams its own rows
// through a ring in shared memory. Device side, except the numbers that a launch needs.
#pragma once

#include <algorithm>

#include "backends/cuda/kv_format.cuh"
#include "backends/cuda/mma.cuh"

namespace thimble::cuda {

// A lane holds a chunk of 8 channels, so kLanes lanes (8, 16, 32) hold a row of at most 8 * kLanes channels,
// and a warp several rows at once; head_dim is a multiple of 8. kHeads query heads (4, 8) use each row. The
// number of rows in a step is chosen so that each lane ends up with one score per round of one head.
template <uint32_t kLanes, uint32_t kHeads>
struct Step {
  static constexpr uint32_t kAtOnce = kWarp / kLanes;   // rows that the warp holds at once
  static constexpr uint32_t kRounds = kLanes / kHeads;  // rows per lane, one after the other
  // round r, lanes from s * kLanes on: row r * kAtOnce + s
  static constexpr uint32_t kRows = kAtOnce * kRounds;
  static constexpr uint32_t kChunks = kRows * kLanes;  // 16 bytes each
};

// How many of n rows each of `warps` warps processes, in whole steps. Warp w of a head's block b takes share
// w * blocks + b, so that even a short list occupies all blocks.
__device__ inline uint32_t rows_per_warp(uint32_t n, uint32_t warps, uint32_t step_rows) {
  const uint32_t rows = (n + warps - 1) / warps;
  return (rows + step_rows - 1) / step_rows * step_rows;
}
// Streams one warp's rows, the entries list[first] to list[end - 1] of kArrays arrays (keys, or keys and
// values), through kStages stages of shared memory. Channels from head_dim on, and rows from `end` on, read
// as zeros.
template <uint32_t kLanes, uint32_t kHeads, uint32_t kArrays, uint32_t kStages, typename Format>
class RowStream {
  using S = Step<kLanes, kHeads>;
  using Unit = typename Format::Unit;

 public:
  static constexpr uint32_t kBytes = kStages * kArrays * S::kChunks * 16;  // of shared memory, per warp
  static constexpr int kCopies = kStages;  // groups of copies that the constructor commits

  // `head_start`: the head's row 0 in each array. `list`: null if entry i is i. `entry`: the
  // entry of row first + lane, if there is such a row. `ring`: kBytes of shared memory.
  __device__ RowStream(const Unit* const (&arrays)[kArrays], uint64_t head_start, uint32_t head_dim,
                       const uint32_t* list, uint32_t first, uint32_t end, uint32_t entry, void* ring)
      : row_units_(Format::row_units(head_dim)),
        list_(list),
        first_(first),
        end_(end),
        fetched_(first),
        ring_(static_cast<uint4*>(ring)),
        next_entry_(entry) {
#pragma unroll
    for (uint32_t a = 0; a < kArrays; ++a) arrays_[a] = arrays[a];
    const uint32_t chunk = lane() % kLanes;
    has_channels_ = chunk * 8 < head_dim;
    start_ = head_start * row_units_ + (has_channels_ ? chunk * Format::kChunkUnits : 0);
#pragma unroll 1
    for (uint32_t stage = 0; stage < kStages; ++stage) fetch(stage);
  }

  // Waits until the next step's rows are visible to the warp.
  __device__ void await() const {
    wait_copies<kStages - 1>();
    __syncwarp();
  }
  // A row of the step that await() made visible.
  __device__ const uint4* row(uint32_t array, uint32_t row) const {
    return ring_ + ((stage_ * kArrays + array) * S::kRows + row) * kLanes;
  }
  // Frees the step's stage and fetches the next step into it.
  __device__ void release() {
    __syncwarp();
    fetch(stage_);
    stage_ = stage_ + 1 < kStages ? stage_ + 1 : 0;
  }

 private:
  __device__ static uint32_t lane() { return threadIdx.x % kWarp; }
  __device__ uint32_t entry_of(uint32_t i) const { return list_ && i < end_ ? list_[i] : i; }

  // A group is committed for every step, even one without rows, so that await() can count groups.
  __device__ void fetch(uint32_t stage) {
    if (fetched_ < end_) {
      // Lanes hold the entries of 32 rows and load the next 32 that much in advance.
      const uint32_t held = (fetched_ - first_) % kWarp;
      if (held == 0) {
        entry_ = next_entry_;
        next_entry_ = entry_of(fetched_ + kWarp + lane());
      }
      uint4* to = ring_ + stage * kArrays * S::kChunks + lane();
#pragma unroll
      for (uint32_t r = 0; r < S::kRounds; ++r) {
        const uint32_t at = r * S::kAtOnce + lane() / kLanes;
        const uint32_t e = __shfl_sync(~0u, entry_, held + at);
        const bool valid = has_channels_ && fetched_ + at < end_;
        const uint64_t from = start_ + (valid ? uint64_t(e) * row_units_ : 0);
#pragma unroll
        for (uint32_t a = 0; a < kArrays; ++a)
          copy_async<16>(to + a * S::kChunks + r * kWarp, arrays_[a] + from, valid);
      }
      fetched_ += S::kRows;
    }
    commit_copies();
  }

  const Unit* arrays_[kArrays];
  uint64_t start_;  // units before the lane's chunk in the KV head's first row
  bool has_channels_;
  uint32_t row_units_;
  const uint32_t* list_;
  uint32_t first_, end_, fetched_;
  uint4* ring_;
  uint32_t stage_ = 0;  // the stage that await() waits for
  uint32_t entry_ = 0, next_entry_;
};

// Sums over the kLanes lanes of a row: lane i gets the sum of x[i]. This takes kLanes - 1 shuffles; separate
// sums would take kLanes * log2(kLanes).
template <uint32_t kLanes, uint32_t kHalf = kLanes / 2>
__device__ inline float sum_across(float (&x)[kLanes]) {
  const bool upper = threadIdx.x & kHalf;
#pragma unroll
  for (uint32_t i = 0; i < kHalf; ++i) {
    const float give = upper ? x[i] : x[i + kHalf], keep = upper ? x[i + kHalf] : x[i];
    x[i] = keep + __shfl_xor_sync(~0u, give, kHalf);
  }
  if constexpr (kHalf > 1) sum_across<kLanes, kHalf / 2>(x);
  return x[0];
}

// How a launch over all KV heads covers the card: one block per multiprocessor, with as many warps as
// registers and shared memory allow. Host side.
struct PoolGrid {
  uint32_t each;    // blocks per KV head if all heads have the same number of entries (head_blocks.cuh)
  uint32_t passes;  // passes over a KV head's group, with `heads` query heads each
};
inline constexpr uint32_t kMostPoolHeads = 8;

// The largest number of blocks in any such launch of a model, which determines the scratch.
inline uint32_t most_pool_blocks(const ModelShape& m, const Card& card) {
  return std::max(m.heads, card.multiprocessors);
}

inline PoolGrid pool_grid(const Card& card, uint32_t kv_heads, uint32_t group, uint32_t heads) {
  const uint32_t passes = static_cast<uint32_t>(ceil_div(group, heads));
  return {std::max(1u, card.multiprocessors / (kv_heads * passes)), passes};
}
// A multiple of 4, because a multiprocessor has four schedulers.
inline uint32_t pool_warps(const Card& card, uint32_t most, uint64_t bytes_per_warp,
                           uint64_t bytes_per_block) {
  return std::min(most,
                  static_cast<uint32_t>((card.shared_bytes - bytes_per_block) / bytes_per_warp) / 4 * 4);
}

}  // namespace thimble::cuda
