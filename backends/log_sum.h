// Merges the parts of a softmax whose keys are read part by part. C++, CUDA and GLSL share this header. The
// caller chooses the base and the precision, because it computes the exponential of gap().
#ifndef THIMBLE_LOG_SUM_H
#define THIMBLE_LOG_SUM_H

#if defined(__CUDACC__)
#define THIMBLE_FUNCTION __device__ inline
#elif defined(__cplusplus)
#define THIMBLE_FUNCTION inline
#else
#define THIMBLE_FUNCTION
#define fabsf abs
#define fmaxf max
#endif

#ifdef __cplusplus
#include <cmath>
namespace thimble {
#endif

// A running maximum `peak`, and `sum`, the sum of base^(score - peak). The logarithm of the sum of base^score
// is peak + log(sum). Without scores, sum is 0 and peak is below every score: -inf if the device supports
// infinities.
struct LogSum {
  float peak, sum;
};

// The exponent of the factor by which the sum with the lower peak is scaled. It is never positive.
THIMBLE_FUNCTION float gap(LogSum a, LogSum b) { return -fabsf(b.peak - a.peak); }

// Merges two LogSums; factor = base^gap(a, b). Any sum with weights base^(score - peak) is scaled the same
// way.
THIMBLE_FUNCTION LogSum merged(LogSum a, LogSum b, float factor) {
  LogSum both;
  both.sum = b.peak > a.peak ? a.sum * factor + b.sum : a.sum + b.sum * factor;
  both.peak = fmaxf(b.peak, a.peak);
  return both;
}

#undef THIMBLE_FUNCTION
#ifdef __cplusplus
}  // namespace thimble
#else
#undef fabsf
#undef fmaxf
#endif

#endif
