// query_keep: keeps the queries of the latest tokens.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = 128) in;

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Kept { float kept[]; };
layout(push_constant) uniform Push {
  QueryKeepParams p;
  uint base[2];
} push;

void main() {
  const uint rows = min(step.n_rows, push.p.ring), c = gl_GlobalInvocationID.x;
  if (gl_WorkGroupID.y >= rows || c >= push.p.cols) return;
  const uint row = step.n_rows - rows + gl_WorkGroupID.y, to = (uint(step.position) + row) % push.p.ring;
  kept[push.base[1] + to * push.p.cols + c] = q[push.base[0] + row * push.p.row_stride + c];
}
