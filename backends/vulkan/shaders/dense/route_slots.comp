// route, second part: a workgroup finds the slots of one expert, in the order of their rows. A subgroup
// processes neighbouring choices, one per lane at a time.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 128;
#include "../scan.glsl"

// [rows][chosen]; so is the next one
layout(set = 0, binding = 1, std430) readonly buffer Experts { uint experts[]; };
layout(set = 0, binding = 2, std430) readonly buffer Weights { float weights[]; };
layout(set = 0, binding = 3, std430) writeonly buffer First { uint first[]; };
layout(set = 0, binding = 4, std430) writeonly buffer RowOfSlot { uint row_of_slot[]; };
layout(set = 0, binding = 5, std430) writeonly buffer WeightOfSlot { float weight_of_slot[]; };
layout(push_constant) uniform Push {
  RouteParams p;
  uint base[5];
} push;

void main() {
  const uint own = gl_WorkGroupID.x, n = step.n_rows * push.p.chosen;
  const uint each = (n + kThreads - 1) / kThreads * gl_SubgroupSize;
  const uint begin = min(gl_SubgroupID * each, n), end = min(begin + each, n);
  uint lower = 0, mine = 0;  // choices of experts before this one, and of this one
  for (uint i = begin + gl_SubgroupInvocationID; i < end; i += gl_SubgroupSize) {
    const uint expert = experts[push.base[0] + i];
    lower += expert < own ? 1 : 0;
    mine += expert == own ? 1 : 0;
  }
  const uint own_first = scan_subgroups(subgroupAdd(lower)).y;
  uint slot = own_first + scan_subgroups(subgroupAdd(mine)).x;
  for (uint tile = begin; tile < end; tile += gl_SubgroupSize) {
    const uint i = tile + gl_SubgroupInvocationID;
    const bool serves = i < end && experts[push.base[0] + i] == own;
    const uvec4 those = subgroupBallot(serves);
    if (serves) {
      const uint at = slot + subgroupBallotExclusiveBitCount(those);
      row_of_slot[push.base[3] + at] = i / push.p.chosen;
      weight_of_slot[push.base[4] + at] = weights[push.base[1] + i];
    }
    slot += subgroupBallotBitCount(those);
  }
  if (gl_LocalInvocationIndex > 0) return;
  first[push.base[2] + own] = own_first;
  if (own == push.p.experts - 1) first[push.base[2] + push.p.experts] = n;
}
