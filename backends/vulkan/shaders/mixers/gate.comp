// gate: multiplies by sigmoids.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"
#include "gates.glsl"

layout(local_size_x = 64) in;

layout(set = 0, binding = 1, std430) readonly buffer G { float g[]; };
layout(set = 0, binding = 2, std430) buffer X { float x[]; };
layout(push_constant) uniform Push {
  GateParams p;
  uint base[2];
} push;

void main() {
  const GateParams p = push.p;
  const uint row = gl_WorkGroupID.y, column = gl_GlobalInvocationID.x;
  if (row >= step.n_rows || column >= p.groups * p.cols) return;
  const uint group = column / p.cols, in_group = p.g_cols == 1 ? 0 : column % p.cols;
  const uint of_g = row * p.g_stride + p.g_column + group * p.g_group_stride + in_group;
  x[push.base[1] + row * p.x_stride + column] *= sigmoid(g[push.base[0] + of_g]);
}
