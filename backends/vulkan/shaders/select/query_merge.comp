// query_score: merges the tiles' sums of each query's weights, and the sink's logit, into one sum. One
// subgroup per query.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#include "../step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 128;  // a multiple of kLanes
layout(constant_id = 1) const uint kLanes = 32;     // lanes per subgroup
layout(constant_id = 2) const bool kHasSinks = false;
layout(constant_id = 3) const bool kHasList = false;
#include "../lanes.glsl"
#include "../log_sum.glsl"

layout(set = 0, binding = 1, std430) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 2, std430) readonly buffer List { uint list[]; };
layout(set = 0, binding = 3, std430) buffer Sums { uint sums[]; };  // bits of floats, from first_head on
layout(push_constant) uniform Push {
  QueryScoreParams p;
  RunWindow window;
  uint base[3];
} push;
#define LIST_BASE push.base[1]
#define LIST_CAPACITY push.p.list_capacity
#include "../list.glsl"

void main() {
  const uint head = push.p.first_head + gl_WorkGroupID.y, lane = gl_SubgroupInvocationID;
  const HeadState own = head_states[push.p.head_state + head];
  if (!is_in(own, push.window)) return;
  const QuerySpan span = query_span(step, own, push.p, list_count(head, step_entries(step, own)));
  if (span.count == 0) return;
  const uint count = units(query_tiles(span), tiles_of_sum(span)), group = push.p.group, vectors = span.rows * group;
  const uint each = kThreads / kLanes;
  for (uint v = gl_WorkGroupID.x * each + gl_SubgroupID; v < vectors; v += gl_NumWorkGroups.x * each) {
    const uint from = push.base[2] + (gl_WorkGroupID.y * push.p.rows * group + v) * kQueryScoreSums;
    LogSum sum = kNoSum;
    for (uint i = lane; i < count; i += kLanes) sum = added(sum, uintBitsToFloat(sums[from + i]));
    const float peak = max_of_lanes(sum.peak);
    LogSum all = LogSum(peak, sum_of_lanes(sum.sum * exp(sum.peak - peak)));
    if (kHasSinks) all = added(all, sinks[push.base[0] + head * group + v % group]);
    if (lane == 0) sums[from] = log_sum_bits(all);
  }
}
