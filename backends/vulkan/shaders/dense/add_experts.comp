// expert_linear, second part: y[row] += weight times the results that expert_linear's products left for the
// row's slots, in order.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "../step.glsl"
#include "dense_params.h"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kChosen = 2;

layout(set = 0, binding = 1, std430) readonly buffer Parts { float parts[]; };              // [slots][cols]
layout(set = 0, binding = 2, std430) readonly buffer SlotsOfRows { uint slots_of_rows[]; };  // [rows][chosen]
layout(set = 0, binding = 3, std430) readonly buffer Weight { float weight[]; };
layout(set = 0, binding = 4, std430) buffer Y { float y[]; };
layout(push_constant) uniform Push {
  AddExpertsParams p;
  uint base[4];
} push;

void main() {
  const uint row = gl_WorkGroupID.y, column = gl_GlobalInvocationID.x;
  if (row >= step.n_rows || column >= push.p.cols) return;
  const uint at = push.base[3] + row * push.p.y_stride + column;
  float sum = y[at];
  [[unroll]] for (uint i = 0; i < kChosen; ++i) {
    const uint slot = slots_of_rows[push.base[1] + row * kChosen + i];
    sum += weight[push.base[2] + slot] * parts[push.base[0] + slot * push.p.cols + column];
  }
  y[at] = sum;
}
