#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"
#include "activate.glsl"
#include "gelu_erf.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const bool kTimes = false;

layout(set = 0, binding = 1, std430) buffer X { float x[]; };
layout(set = 0, binding = 2, std430) readonly buffer Times { float times[]; };
layout(push_constant) uniform Push {
  ActivationParams p;
  uint base[2];
} push;

void main() {
  const uint row = gl_WorkGroupID.y, column = gl_GlobalInvocationID.x;
  if (row >= step.n_rows || column >= push.p.cols) return;
  const uint index = row * push.p.cols + column, at = push.base[0] + index;
  float made = x[at];
  if (push.p.act == kActReluSqr)
    made = relu_sqr(made);
  else
    made = push.p.act == kActGeluErf ? gelu_erf(made) : activate(made, push.p.act);
  x[at] = kTimes ? made * times[push.base[1] + index] : made;
}
