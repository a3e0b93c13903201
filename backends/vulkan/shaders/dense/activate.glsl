// The functions of activation and glu.
#include "../exp.glsl"

float relu_sqr(float x) { return x < 0 ? 0 : x * x; }  // NaN passes through

// silu is x * sigmoid(x); gelu's 0.5 x (1 + tanh u) is x * sigmoid(2 u).
float activate(float x, uint act) {
  const float s = act == kActSilu ? x : 1.59576912 * x * (1.0 + 0.044715 * x * x);  // 2 sqrt(2 / pi)
  return x / (1.0 + exp_ulp(-s));
}
