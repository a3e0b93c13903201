// Gates of the recurrent mixers. A NaN stays one, which exp_ulp() would hide.
#include "../exp.glsl"

float keep_nan(float x, float result) {
  return (floatBitsToUint(x) & 0x7fffffffu) > 0x7f800000u ? x : result;
}
float sigmoid(float x) { return keep_nan(x, 1 / (1 + exp_ulp(-x))); }
float silu(float x) { return x / (1 + exp_ulp(-x)); }

// log(1 + e^x) with a relative error of a few ulp. GLSL's log() of numbers near 1 may be off by 2^-21.
float softplus(float x) {
  // log(1 + e) = 2 atanh(e / (2 + e)), and the series at most 1/3 is off by less than 2^-29.
  const float e = exp_ulp(-abs(x)), s = e / (2 + e), t = s * s;
  float series = 1.0 / 15;
  series = series * t + 1.0 / 13;
  series = series * t + 1.0 / 11;
  series = series * t + 1.0 / 9;
  series = series * t + 1.0 / 7;
  series = series * t + 1.0 / 5;
  series = series * t + 1.0 / 3;
  return keep_nan(x, max(x, 0) + 2 * (s + s * t * series));
}
