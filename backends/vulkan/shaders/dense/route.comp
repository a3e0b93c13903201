// route, first part: a subgroup chooses a row's experts. This is all in a program of a single row; otherwise
// route_slots.comp then groups the rows by expert.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "../exp.glsl"
#include "../step.glsl"

layout(local_size_x_id = 0) in;  // one subgroup
const uint kLanes = gl_WorkGroupSize.x;
layout(constant_id = 1) const uint kExperts = 8;
layout(constant_id = 2) const uint kRouted = 2;
layout(constant_id = 3) const bool kOneRow = false;
layout(constant_id = 4) const bool kHasRouteBias = false;
layout(constant_id = 5) const bool kHasEach = false;
layout(constant_id = 6) const uint kGroups = 1;
layout(constant_id = 7) const uint kGroupsUsed = 1;

layout(set = 0, binding = 1, std430) readonly buffer Logits { float logits[]; };
layout(set = 0, binding = 2, std430) readonly buffer Bias { float bias[]; };
// [rows][chosen], the experts of a row ascending. For a single row these are the op's output, because slots
// then have this order.
layout(set = 0, binding = 3, std430) writeonly buffer Experts { uint experts[]; };
layout(set = 0, binding = 4, std430) writeonly buffer Weights { float weights[]; };
// This buffer and the next one are used only for a single row
layout(set = 0, binding = 5, std430) writeonly buffer First { uint first[]; };
layout(set = 0, binding = 6, std430) writeonly buffer RowOfSlot { uint row_of_slot[]; };
layout(set = 0, binding = 7, std430) readonly buffer Each { float each[]; };
layout(push_constant) uniform Push {
  RouteParams p;
  uint base[7];
} push;

#include "route.glsl"
float logit(uint expert) { return logits[push.base[0] + gl_WorkGroupID.x * kExperts + expert]; }
float route_bias(uint expert) { return bias[push.base[1] + expert]; }
float route_each(uint expert) { return each[push.base[6] + expert]; }
RouteParams route_params() { return push.p; }

void main() {
  const uint row = gl_WorkGroupID.x;
  if (row >= step.n_rows) return;
  route_row(true);
  weigh_chosen();
  uint place = chosen_before();
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const uint expert = expert_of(i), at = row * kRouted + place;
    if (kOneRow && expert < kExperts) first[push.base[4] + expert] = place;
    if (!chosen[i]) continue;
    weights[push.base[3] + at] = shares[i];
    if (kOneRow)
      row_of_slot[push.base[5] + at] = 0;
    else
      experts[push.base[2] + at] = expert;
    ++place;
  }
  if (kOneRow && gl_SubgroupInvocationID == 0) first[push.base[4] + kExperts] = kRouted;
}
