// What the kernels of decode attention share: above all the partial results of blocks, which a second kernel
// combines. Host and device side.
#pragma once

#include "backends/cuda/attention/attended.cuh"
#include "backends/cuda/attention/attention.h"
#include "backends/cuda/attention/pool_rows.cuh"
#include "backends/cuda/rope.cuh"

namespace thimble::cuda {

// List entries per tile: keys rotate by their index in it, the query by the rest.
inline constexpr uint32_t kTile = 64;
inline constexpr float kLog2E = 1.44269504f;  // queries are scaled by it, so that the softmax works in base 2

// Where a lane's four pairs of channels are stored in a row. Pair i of a lane is pair 4 * chunk + i of the
// head. Pairs from n_rot / 2 on do not rotate, so any two channels can form one.
enum class Pairs {
  kAdjacent,  // 8 neighbouring channels
  // 4 channels, and the 4 that are n_rot / 2 after them; or 8 neighbouring channels if nothing rotates
  kHalves,
  kAny,  // n_rot / 2 is not a multiple of 4, so only some of a lane's pairs may rotate; or it is 0
};

// The partial results of blocks. For each query head: the output before division by the sum, and {maximum,
// sum}; [query heads][blocks of the KV head] each. If a block had no rows, the maximum is -inf and the rest
// is 0.
struct Parts {
  float* out;  // head_dim floats each
  float2* peak_and_sum;
  // Index of the first part of a query head, whose number is within its group.
  __device__ static uint32_t first(const HeadBlocks& own, uint32_t group, uint32_t query_head) {
    return own.first * group + query_head * own.count;
  }
};

// Combines the peaks and sums of several parts and computes the factor of each part's output. A factor of 0
// marks a part without rows, whose output may be NaN.
template <uint32_t kParts>
__device__ inline float2 weigh(const float2 (&parts)[kParts], float (&factors)[kParts]) {
  float2 all{-kInfinity, 0};
#pragma unroll
  for (uint32_t i = 0; i < kParts; ++i) all.x = fmaxf(all.x, parts[i].x);
#pragma unroll
  for (uint32_t i = 0; i < kParts; ++i) {
    factors[i] = parts[i].x > -kInfinity ? exp2f(parts[i].x - all.x) : 0;
    if (factors[i] != 0) all.y += parts[i].y * factors[i];
  }
  return all;
}

// Adds the kernel that combines the parts.
void combine_parts(const Launch&, const Attention&, const PoolGrid&, const Parts&);

// Adds the kernel that attends to the program, put(parts, rope), and the kernel that combines its parts.
template <typename Put>
void attend_and_combine(const Launch& l, const Attention& op, const PoolGrid& grid, const Put& put) {
  const AttentionParams& p = op.p;
  float* const out = reinterpret_cast<float*>(l.scratch);
  const uint64_t parts = uint64_t(grid.each) * p.heads * p.group;
  const Parts all{out, reinterpret_cast<float2*>(out + parts * p.head_dim)};
  put(all, Rope{data<float2>(op.rope), p.rope.n_rot / 2});
  combine_parts(l, op, grid, all);
}

// Attention of a single row to a pool of blocks, on matrix units. Returns false where it has no kernel for
// the widths, formats and rotation of the op.
bool attend_blocks(const Launch&, const Attention&);
// The same for whole runs on Hopper, which has faster ways to copy them.
bool attend_runs(const Launch&, const Attention&);

}  // namespace thimble::cuda
