// How votes are computed. Device side.
#pragma once

#include "backends/cuda/log_sum.cuh"

namespace thimble::cuda {

// The votes of a KV head's query heads for entries: the logarithms of the sums of exp(score - lse). `scores`
// begins with those of the first query head; rows are score_capacity apart. lse() returns the query heads'
// log-sum-exps and is called after the first scores were requested. NaN and -inf are ignored; a vote has an
// error of up to 2^-20.
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
        if (first + h < group) x[i][h] = fmaxf(x[i][h] - own_lse[h], -kInfinity);  // NaN becomes -inf
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
