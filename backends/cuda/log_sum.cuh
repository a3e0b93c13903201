// The running logarithm of a sum of exponentials. Device side.
#pragma once

#include "backends/cuda/kernel.cuh"
#include "backends/log_sum.h"

namespace thimble::cuda {

inline constexpr LogSum kNoSum{-kInfinity, 0};

// NaN and -inf are ignored.
__device__ inline void add(LogSum& own, LogSum other) {
  if (other.peak > -kInfinity) own = merged(own, other, expf(gap(own, other)));
}
__device__ inline void add(LogSum& own, float x) { add(own, LogSum{x, 1}); }

// The logarithm of the sum.
__device__ inline float log_of(LogSum s) { return s.peak > -kInfinity ? s.peak + logf(s.sum) : -kInfinity; }

// A peak that can be subtracted from itself and from smaller values without giving NaN.
__device__ inline float finite(float peak) { return fminf(fmaxf(peak, -3.4e38f), 3.4e38f); }

// The sum of all x, with a shorter dependency chain than adding one after the other. NaN and -inf are ignored
// here too. A weight has an error of up to 2^-20 of the largest.
template <uint32_t kCount>
__device__ inline LogSum log_sum(float (&x)[kCount]) {
  LogSum total = kNoSum;
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    x[i] = fmaxf(x[i], -kInfinity);  // NaN becomes -inf
    total.peak = fmaxf(total.peak, x[i]);
  }
  if (!(total.peak > -kInfinity)) return kNoSum;
  total.peak = fminf(total.peak, 3.4e38f);  // then the sum is infinite
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) total.sum += __expf(x[i] - total.peak);
  return total;
}

// The sum over the lanes of a warp that differ only in bits from `first` on; all of them get it.
__device__ inline LogSum warp_log_sum(LogSum own, uint32_t first = 1) {
  float peak = own.peak;
#pragma unroll
  for (uint32_t offset = kWarp / 2; offset >= first; offset /= 2)
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, offset));
  peak = finite(peak);
  float sum = own.sum * __expf(own.peak - peak);
#pragma unroll
  for (uint32_t offset = kWarp / 2; offset >= first; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return {peak, sum};
}
// The first of `count` parts that a lane adds up, loaded ahead of log_sum_exp().
__device__ inline LogSum first_part(const LogSum* parts, uint32_t count) {
  if (threadIdx.x % kWarp < count) return parts[threadIdx.x % kWarp];
  return kNoSum;
}
// The logarithm of the sum of all parts, in every lane of the warp that calls this; `own` is first_part().
__device__ inline float log_sum_exp(const LogSum* parts, uint32_t count, LogSum own) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x % kWarp + kWarp; i < count; i += kWarp) add(own, parts[i]);
  return log_of(warp_log_sum(own));
}

}  // namespace thimble::cuda
