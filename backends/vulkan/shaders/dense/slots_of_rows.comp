// expert_linear of many rows: finds the slots of each row, one subgroup per row.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_ballot : require
#include "../step.glsl"
#include "dense_params.h"

layout(local_size_x_id = 0) in;  // one subgroup
const uint kLanes = gl_WorkGroupSize.x;
layout(constant_id = 1) const uint kChosen = 2;

layout(set = 0, binding = 1, std430) readonly buffer First { uint first[]; };
layout(set = 0, binding = 2, std430) readonly buffer RowOfSlot { uint row_of_slot[]; };
layout(set = 0, binding = 3, std430) writeonly buffer SlotsOfRows { uint slots_of_rows[]; };  // [rows][chosen], ascending
layout(push_constant) uniform Push {
  SlotsOfRowsParams p;
  uint base[3];
} push;

// Each lane searches for the row in the slots of an expert, in which rows ascend.
void main() {
  const uint row = gl_WorkGroupID.x;
  if (row >= step.n_rows) return;
  uint found = 0;
  for (uint from = 0; from < push.p.experts; from += kLanes) {
    const uint e = from + gl_SubgroupInvocationID;
    uint at = 0, end = 0;
    if (e < push.p.experts) {
      at = first[push.base[0] + e];
      end = first[push.base[0] + e + 1];
    }
    const uint behind = end;
    while (at < end) {
      const uint middle = (at + end) / 2;
      if (row_of_slot[push.base[1] + middle] < row)
        at = middle + 1;
      else
        end = middle;
    }
    const bool serves = at < behind && row_of_slot[push.base[1] + at] == row;
    const uvec4 all = subgroupBallot(serves);
    const uint place = min(found + subgroupBallotExclusiveBitCount(all), kChosen - 1);
    if (serves) slots_of_rows[push.base[2] + row * kChosen + place] = at;
    found += subgroupBallotBitCount(all);
  }
}
