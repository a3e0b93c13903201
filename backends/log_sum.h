// How the parts of a softmax become one, for keys that are read part by part: the same for C++, CUDA and
// GLSL. In which base, and how exactly, is the caller's choice: it says what the exponential of gap() is.
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

// A running maximum, and the sum of base^(score - peak); the logarithm of all base^score is peak + log(sum).
// Of no scores the sum is 0, and the peak lies below every score: -inf where the device computes with
// infinities.
struct LogSum {
  float peak, sum;
};

// The exponent by which the sum with the lower peak counts beside the other: never positive.
THIMBLE_FUNCTION float gap(LogSum a, LogSum b) { return -fabsf(b.peak - a.peak); }

// The scores of both; factor = base^gap(a, b). What is summed with weights base^(score - peak) is scaled
// likewise.
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
