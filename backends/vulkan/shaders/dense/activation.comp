#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"
#include "activate.glsl"
#include "gelu_erf.glsl"

layout(local_size_x = 64) in;

layout(set = 0, binding = 1, std430) buffer X { float x[]; };
layout(push_constant) uniform Push {
  ActivationParams p;
  uint base[1];
} push;

void main() {
  const uint row = gl_WorkGroupID.y, column = gl_GlobalInvocationID.x;
  if (row >= step.n_rows || column >= push.p.cols) return;
  const uint at = push.base[0] + row * push.p.cols + column;
  x[at] = push.p.act == kActGeluErf ? gelu_erf(x[at]) : activate(x[at], push.p.act);
}
