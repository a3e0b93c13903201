#version 450
// rms_norm: a workgroup divides a vector by its root mean square and multiplies it by a weight. It may first
// subtract the vector's mean. A thread keeps its quads of the vector in registers, because a single row has no other work to hide a second read.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "../step.glsl"

layout(local_size_x_id = 0) in;
const uint kThreads = gl_WorkGroupSize.x;
#include "../reduce.glsl"
layout(constant_id = 1) const uint kEach = 1;         // the most quads per thread
// All vectors begin at whole quads and consist of whole quads
layout(constant_id = 2) const bool kInQuads = false;
layout(constant_id = 3) const bool kAdds = false;
layout(constant_id = 4) const bool kCenters = false;
layout(constant_id = 5) const bool kHasWeight = true;

layout(set = 0, binding = 1, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = 1, std430) readonly buffer XQuads { vec4 x_quads[]; };
layout(set = 0, binding = 2, std430) readonly buffer Weight { float weight[]; };
layout(set = 0, binding = 2, std430) readonly buffer WeightQuads { vec4 weight_quads[]; };
layout(set = 0, binding = 3, std430) buffer Y { float y[]; };
layout(set = 0, binding = 3, std430) buffer YQuads { vec4 y_quads[]; };
layout(push_constant) uniform Push {
  RmsNormParams p;
  uint base[3];
} push;

void main() {
  const uint row = gl_WorkGroupID.y, cols = push.p.cols;
  if (row >= row_count(push.p.rows)) return;
  const uint from = push.base[0] + row * push.p.x_row_stride + gl_WorkGroupID.x * push.p.x_group_stride;
  const uint to = push.base[2] + row * push.p.row_stride + gl_WorkGroupID.x * cols, of_weight = push.base[1];
  vec4 quads[kEach];
  float squares = 0, sum = 0;
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const uint c = 4 * (i * kThreads + gl_LocalInvocationIndex);
    quads[i] = vec4(0);
    if (kInQuads) {
      if (c < cols) quads[i] = x_quads[(from + c) / 4];
    } else {
      for (uint k = 0; k < 4 && c + k < cols; ++k) quads[i][k] = x[from + c + k];
    }
    if (kCenters)
      sum += (quads[i].x + quads[i].y) + (quads[i].z + quads[i].w);
    else
      squares += dot(quads[i], quads[i]);
  }
  if (kCenters) {
    const float mean = group_sum(sum) / float(cols);
    [[unroll]] for (uint i = 0; i < kEach; ++i) {
      const uint c = 4 * (i * kThreads + gl_LocalInvocationIndex);
      [[unroll]] for (uint k = 0; k < 4; ++k)
        if (c + k < cols) quads[i][k] -= mean;  // the rest stays 0
      squares += dot(quads[i], quads[i]);
    }
  }
  const float scale = inversesqrt(group_sum(squares) / float(cols) + push.p.eps);
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const uint c = 4 * (i * kThreads + gl_LocalInvocationIndex);
    if (kInQuads) {
      if (c >= cols) continue;
      const vec4 normed = quads[i] * scale * (kHasWeight ? weight_quads[(of_weight + c) / 4] : vec4(1));
      y_quads[(to + c) / 4] = kAdds ? y_quads[(to + c) / 4] + normed : normed;
    } else {
      for (uint k = 0; k < 4 && c + k < cols; ++k) {
        const float normed = quads[i][k] * scale * (kHasWeight ? weight[of_weight + c + k] : 1);
        y[to + c + k] = kAdds ? y[to + c + k] + normed : normed;
      }
    }
  }
}
