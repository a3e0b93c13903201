// What votes are made of. Device side.
#pragma once

#include "backends/cuda/log_sum.cuh"

namespace thimble::cuda {

// What the query heads of a KV head say about entries: the logarithms of the sums of exp(score - lse).
// `scores` begin with the first query head's, its rows lie score_capacity apart; lse() is asked for where
// their log-sum-exps begin once the first scores are under way. NaN and -inf count for nothing; a vote is
// good to 2^-20.
template <uint32_t kCount, typename Lse>
__device__ inline void group_votes(const float* scores, uint32_t group, uint32_t score_capacity,
                                   const uint32_t (&entry)[kCount], const Lse& lse, float (&vote)[kCount]) {
  constexpr uint32_t kHeads = 4;  // at once
  float peak[kCount], sum[kCount];
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) peak[i] = finite(-kInfinity), sum[i] = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < group; first += kHeads) {
    float x[kCount][kHeads];
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i)
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h)
        x[i][h] = first + h < group ? scores[uint64_t(first + h) * score_capacity + entry[i]] : -kInfinity;
    const float* const own_lse = lse() + first;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      float top = peak[i];
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h) {
        if (first + h < group) x[i][h] = fmaxf(x[i][h] - own_lse[h], -kInfinity);  // of NaN: -inf
        top = fmaxf(top, x[i][h]);
      }
      top = finite(top);
      if (first > 0) sum[i] *= __expf(peak[i] - top);
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h) sum[i] += __expf(x[i][h] - top);
      peak[i] = top;
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) vote[i] = peak[i] + __logf(sum[i]);
}

}  // namespace thimble::cuda
