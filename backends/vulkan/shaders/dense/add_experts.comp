// expert_linear, its second part: y[row] += weight times what expert_linear's products left of the row's slots, in their order.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_ballot : require
#include "../step.glsl"
#include "dense_params.h"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kChosen = 2;
layout(constant_id = 1) const uint kLanes = 32;         // of a subgroup
layout(constant_id = 2) const bool kOneRow = false;     // whose slots are all there are

layout(set = 0, binding = 1, std430) readonly buffer Parts { float parts[]; };  // [slots][cols]
layout(set = 0, binding = 2, std430) readonly buffer First { uint first[]; };
layout(set = 0, binding = 3, std430) readonly buffer RowOfSlot { uint row_of_slot[]; };
layout(set = 0, binding = 4, std430) readonly buffer Weight { float weight[]; };
layout(set = 0, binding = 5, std430) buffer Y { float y[]; };
layout(push_constant) uniform Push {
  AddExpertsParams p;
  uint base[5];
} push;

shared uint slots[kChosen];

// A subgroup looks the row up in the slots of all experts, in which rows ascend.
void find_slots(uint row) {
  uint found = 0;
  for (uint from = 0; from < push.p.experts; from += kLanes) {
    const uint e = from + gl_SubgroupInvocationID;
    uint at = 0, end = 0;
    if (e < push.p.experts) {
      at = first[push.base[1] + e];
      end = first[push.base[1] + e + 1];
    }
    const uint behind = end;
    while (at < end) {
      const uint middle = (at + end) / 2;
      if (row_of_slot[push.base[2] + middle] < row)
        at = middle + 1;
      else
        end = middle;
    }
    const bool serves = at < behind && row_of_slot[push.base[2] + at] == row;
    const uvec4 all = subgroupBallot(serves);
    if (serves) slots[min(found + subgroupBallotExclusiveBitCount(all), kChosen - 1)] = at;
    found += subgroupBallotBitCount(all);
  }
}

void main() {
  const uint row = gl_WorkGroupID.y, column = gl_GlobalInvocationID.x;
  if (row >= step.n_rows) return;
  if (!kOneRow) {
    if (gl_SubgroupID == 0) find_slots(row);
    barrier();
  }
  if (column >= push.p.cols) return;
  const uint at = push.base[4] + row * push.p.y_stride + column;
  float sum = y[at];
  for (uint i = 0; i < kChosen; ++i) {
    const uint slot = kOneRow ? i : slots[i];
    sum += weight[push.base[3] + slot] * parts[push.base[0] + slot * push.p.cols + column];
  }
  y[at] = sum;
}
