#version 450
#extension GL_GOOGLE_include_directive : require
#include "step.glsl"

layout(local_size_x = 64) in;

layout(set = 0, binding = 1, std430) readonly buffer Source { uint source[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Destination { uint destination[]; };
layout(push_constant) uniform Push {
  CopyParams p;
  uint base[2];
} push;

void main() {
  const uint row = gl_WorkGroupID.y;
  if (row >= row_count(push.p.rows)) return;
  const uint from = push.base[0] + (row + (push.p.from_logit_row != 0 ? step.first_logit_row : 0)) * push.p.src_stride;
  const uint to = push.base[1] + (row + (push.p.to_ring_row != 0 ? step.ring_row : 0)) * push.p.dst_stride;
  for (uint c = gl_GlobalInvocationID.x; c < push.p.cols; c += gl_NumWorkGroups.x * gl_WorkGroupSize.x)
    destination[to + c] = source[from + c];
}
