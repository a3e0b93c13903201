// The running logarithm of a sum of exponentials.
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../../log_sum.h"

const float kNoPeak = -3e38;  // below every score; finite, because not every device supports infinities
const uint kMinusInfinity = 0xff800000;

const LogSum kNoSum = LogSum(kNoPeak, 0);

// exp(-d) may be off by 3 + 2 d ulp, but its term is so much smaller than the sum that the sum is off by at
// most 3: for d > 0, (3 + 2 d) exp(-d) is never more.
LogSum added(LogSum a, LogSum b) { return merged(a, b, exp(gap(a, b))); }
// NaN and -inf are ignored.
LogSum added(LogSum a, float x) {
  const uint bits = floatBitsToUint(x);
  return bits == kMinusInfinity || (bits & 0x7fffffff) > 0x7f800000 ? a : added(a, LogSum(x, 1));
}
// Adds the first `count` of four numbers at once, with half as many instructions as one after the other.
LogSum added(LogSum a, vec4 x, uint count) {
  const float kNothing = 1.1 * kNoPeak;
  [[unroll]] for (uint i = 0; i < 4; ++i) {
    const uint bits = floatBitsToUint(x[i]);
    if (i >= count || bits == kMinusInfinity || (bits & 0x7fffffff) > 0x7f800000) x[i] = kNothing;
  }
  const float peak = max(a.peak, max(max(x.x, x.y), max(x.z, x.w)));
  float sum = a.peak == peak ? a.sum : a.sum * exp(a.peak - peak);  // the peak may be infinite
  [[unroll]] for (uint i = 0; i < 4; ++i) sum += x[i] == peak ? 1 : exp(x[i] - peak);
  return LogSum(peak, sum);
}
// The bits of the logarithm, including those of -inf.
uint log_sum_bits(LogSum s) { return s.sum > 0 ? floatBitsToUint(s.peak + log(s.sum)) : kMinusInfinity; }
