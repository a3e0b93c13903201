// kv_recall: finds for each row how many of the listed entries come before it. The run has been compacted to
// them.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = 128) in;

layout(set = 0, binding = 1, std430) readonly buffer Lists { uint lists[]; };
layout(set = 0, binding = 2, std430) readonly buffer Count { uint row_counts[]; };
layout(set = 0, binding = 3, std430) readonly buffer RowPos { int row_pos[]; };
layout(set = 0, binding = 4, std430) readonly buffer Pos { int pos[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Before { uint before[]; };  // at the row's index in its run
layout(push_constant) uniform Push {
  KvRecallParams p;
  uint base[5];
} push;

// Index of the first of n ascending positions of a run that is not less than `of`.
uint lower_bound(uint run, uint n, int of) {
  uint low = 0;
  while (low < n) {
    const uint middle = (low + n) / 2;
    if (pos[push.base[3] + run + middle] < of)
      low = middle + 1;
    else
      n = middle;
  }
  return low;
}

void main() {
  const uint head = push.p.first_head + gl_WorkGroupID.y, run = head_states[push.p.head_state + head].first;
  const uint listed = lists[push.base[0] + head * push.p.list_capacity], rows = row_counts[push.base[1] + head];
  for (uint i = gl_GlobalInvocationID.x; i < rows; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x)
    before[push.base[4] + run + i] =
        lower_bound(run, listed, row_pos[push.base[2] + head * push.p.row_capacity + i]);
}
