#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

const uint kThreads = 64, kEach = 4;  // kEach: words or quads per thread, all loaded at once
layout(local_size_x = 64) in;
// All rows begin at whole quads and consist of whole quads
layout(constant_id = 0) const bool kInQuads = false;

layout(set = 0, binding = 1, std430) readonly buffer Source { uint source[]; };
layout(set = 0, binding = 1, std430) readonly buffer SourceQuads { uvec4 source_quads[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Destination { uint destination[]; };
layout(set = 0, binding = 2, std430) writeonly buffer DestinationQuads { uvec4 destination_quads[]; };
layout(push_constant) uniform Push {
  CopyParams p;
  uint base[2];
} push;

void main() {
  const uint row = gl_WorkGroupID.y;
  if (row >= row_count(push.p.rows)) return;
  const uint from = push.base[0] + (row + (push.p.from_logit_row != 0 ? step.first_logit_row : 0)) * push.p.src_stride;
  const uint to = push.base[1] + (row + (push.p.to_ring_row != 0 ? step.ring_row : 0)) * push.p.dst_stride;
  const uint first = gl_WorkGroupID.x * (kThreads * kEach) + gl_LocalInvocationIndex;
  const uint count = kInQuads ? push.p.cols / 4 : push.p.cols;
  uvec4 quads[kEach];
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const uint at = first + i * kThreads;
    if (at >= count) continue;
    quads[i] = kInQuads ? source_quads[from / 4 + at] : uvec4(source[from + at]);
  }
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const uint at = first + i * kThreads;
    if (at >= count) continue;
    if (kInQuads)
      destination_quads[to / 4 + at] = quads[i];
    else
      destination[to + at] = quads[i].x;
  }
}
