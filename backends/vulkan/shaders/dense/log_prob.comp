#version 450
// log_prob: log softmax of each row at its target, one workgroup per row.
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "../step.glsl"
#include "../exp.glsl"

layout(local_size_x_id = 0) in;
const uint kThreads = gl_WorkGroupSize.x;
#include "../reduce.glsl"

layout(set = 0, binding = 1, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = 2, std430) readonly buffer Target { uint target[]; };
layout(set = 0, binding = 3, std430) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
  LogProbParams p;
  uint base[3];
} push;

void main() {
  const uint row = gl_WorkGroupID.x, cols = push.p.cols, from = push.base[0] + row * cols;
  if (row >= step.n_logit_rows) return;
  float largest = x[from];
  for (uint c = gl_LocalInvocationIndex; c < cols; c += kThreads) largest = max(largest, x[from + c]);
  largest = group_max(largest);

  // The CPU adds in double. Here the rounding error of an addition is carried into the next one (Kahan), so
  // that the sum of a thread's hundreds of terms is off by an ulp or two.
  precise float sum = 0, carry = 0;
  for (uint c = gl_LocalInvocationIndex; c < cols; c += kThreads) {
    precise const float term = exp_ulp(x[from + c] - largest) - carry;
    precise const float next = sum + term;
    carry = (next - sum) - term;
    sum = next;
  }
  const float total = group_sum(sum);
  if (gl_LocalInvocationIndex != 0) return;

  // The difference of two logits may be large and the logarithm small. The rounding error of the difference
  // is added to the logarithm, so that only the last subtraction rounds.
  const float logit = x[from + target[push.base[1] + row]];
  precise const float difference = logit - largest, taken = difference - logit;
  precise const float rest = (logit - (difference - taken)) - (largest + taken);
  y[push.base[2] + row] = difference - (log(total) - (isinf(logit) ? 0 : rest));
}
