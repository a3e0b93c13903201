// gated_norm: a workgroup takes a vector, and a thread keeps its quads of it in registers.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "../step.glsl"
#include "gates.glsl"

layout(local_size_x_id = 0) in;
const uint kThreads = gl_WorkGroupSize.x;
#include "../reduce.glsl"
layout(constant_id = 1) const uint kEach = 1;         // the most quads per thread
// All vectors begin at whole quads and consist of whole quads
layout(constant_id = 2) const bool kInQuads = false;
layout(constant_id = 3) const uint kOrder = 0;
layout(constant_id = 4) const bool kSilu = false;     // else sigmoid
layout(constant_id = 5) const bool kHasWeight = false;

layout(set = 0, binding = 1, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = 1, std430) readonly buffer XQuads { vec4 x_quads[]; };
layout(set = 0, binding = 2, std430) readonly buffer Z { float z[]; };
layout(set = 0, binding = 2, std430) readonly buffer ZQuads { vec4 z_quads[]; };
layout(set = 0, binding = 3, std430) readonly buffer Weight { float weight[]; };
layout(set = 0, binding = 3, std430) readonly buffer WeightQuads { vec4 weight_quads[]; };
layout(set = 0, binding = 4, std430) writeonly buffer Y { float y[]; };
layout(set = 0, binding = 4, std430) writeonly buffer YQuads { vec4 y_quads[]; };
layout(push_constant) uniform Push {
  GatedNormParams p;
  uint base[4];
} push;

float act(float of) { return kSilu ? silu(of) : sigmoid(of); }

void main() {
  const GatedNormParams p = push.p;
  const uint group = gl_WorkGroupID.x, row = gl_WorkGroupID.y, cols = p.cols;
  if (row >= step.n_rows) return;
  const uint at = row * p.row_stride + group * cols;
  const uint from = push.base[0] + at, to = push.base[3] + at;
  const uint of_z = push.base[1] + row * p.z_stride + p.z_column + group * cols;
  const uint of_weight = push.base[2] + (p.weight_per_group == 1 ? group * cols : 0);
  vec4 quads[kEach], gates[kEach];
  float squares = 0;
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const uint c = 4 * (i * kThreads + gl_LocalInvocationIndex);
    quads[i] = gates[i] = vec4(0);
    if (kInQuads) {
      if (c < cols) quads[i] = x_quads[(from + c) / 4], gates[i] = z_quads[(of_z + c) / 4];
    } else {
      for (uint k = 0; k < 4 && c + k < cols; ++k) quads[i][k] = x[from + c + k], gates[i][k] = z[of_z + c + k];
    }
    [[unroll]] for (uint k = 0; k < 4; ++k) gates[i][k] = act(gates[i][k]);
    if (kOrder != kNormThenGate) quads[i] *= gates[i];
    squares += dot(quads[i], quads[i]);
  }
  float scale = 1;
  if (kOrder != kGateOnly) scale = inversesqrt(group_sum(squares) / float(cols) + p.eps);
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const uint c = 4 * (i * kThreads + gl_LocalInvocationIndex);
    vec4 result = quads[i] * scale;
    if (kOrder == kNormThenGate) result *= gates[i];
    if (kInQuads) {
      if (c < cols) y_quads[(to + c) / 4] = kHasWeight ? result * weight_quads[(of_weight + c) / 4] : result;
    } else {
      for (uint k = 0; k < 4 && c + k < cols; ++k)
        y[to + c + k] = kHasWeight ? result[k] * weight[of_weight + c + k] : result[k];
    }
  }
}
