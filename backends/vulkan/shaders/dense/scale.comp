#version 450
#extension GL_GOOGLE_include_directive : require
#include "../soft_cap.glsl"
#include "../step.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const bool kHasPositions = false;

layout(set = 0, binding = 1, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = 2, std430) buffer Y { float y[]; };
layout(set = 0, binding = 3, std430) readonly buffer Positions { int positions[]; };  // of the rows
layout(push_constant) uniform Push {
  ScaleParams p;
  uint base[3];
} push;

void main() {
  const uint row = gl_WorkGroupID.y, column = gl_GlobalInvocationID.x;
  if (row >= row_count(push.p.rows) || column >= push.p.cols) return;
  float scale = push.p.scale;
  if (push.p.growth != 0) {
    const uint position = uint(kHasPositions ? positions[push.base[2] + row] : step.position + int(row));
    scale *= 1 + push.p.growth * log(float(1 + position / push.p.period));
  }
  const uint i = row * push.p.row_stride + column, to = push.base[1] + i;
  float scaled = scale * x[push.base[0] + i];
  if (push.p.cap != 0) scaled = soft_cap(scaled, push.p.cap);
  y[to] = push.p.add != 0 ? y[to] + scaled : scaled;
}
