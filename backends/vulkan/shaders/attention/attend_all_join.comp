// attend_all: joins the parts of a vector of queries, and its sink. A workgroup takes a vector.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../log_sum.glsl"
#include "../step.glsl"
#include "attend_all_params.h"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint kHeadDim = 128;
layout(constant_id = 1) const bool kHasSinks = false;

layout(set = 0, binding = 1, std430) readonly buffer Parts { float parts[]; };  // attend_all
layout(set = 0, binding = 2, std430) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 3, std430) readonly buffer Count { uint page_counts[]; };
layout(set = 0, binding = 4, std430) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
  AttendAllJoinParams p;
  uint base[4];
} push;

void main() {
  bool works = push.p.if_stored == 0;
  for (uint head = 0; head < push.p.heads && !works; ++head) works = page_counts[push.base[2] + head] != 0;
  const uint row = gl_WorkGroupID.x, query = gl_WorkGroupID.y;
  if (!works || row >= step.n_rows) return;
  const uint words = kHeadDim + 2, first = push.base[0] + (row * gl_NumWorkGroups.y + query) * push.p.parts * words;
  LogSum all = kHasSinks ? LogSum(sinks[push.base[1] + query], 1) : kNoSum;
  for (uint part = 0; part < push.p.parts; ++part)
    all = added(all, LogSum(parts[first + part * words], parts[first + part * words + 1]));
  for (uint c = gl_LocalInvocationIndex; c < kHeadDim; c += gl_WorkGroupSize.x) {
    float sum = 0;
    for (uint part = 0; part < push.p.parts; ++part)
      sum += parts[first + part * words + 2 + c] * exp(parts[first + part * words] - all.peak);
    y[push.base[3] + row * push.p.y_stride + query * kHeadDim + c] = sum / all.sum;
  }
}
