// attend_all: scales the queries, and rotates them to their places. A workgroup takes a vector.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"
#include "attend_all_params.h"

layout(local_size_x = 64) in;

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 3, std430) readonly buffer Count { uint page_counts[]; };
layout(set = 0, binding = 4, std430) readonly buffer Table { uint table[]; };  // attend_all_pages
layout(set = 0, binding = 5, std430) writeonly buffer Rotated { float rotated_q[]; };  // [heads][rows][group][dh]
layout(push_constant) uniform Push {
  AttendAllQueryParams p;
  uint base[5];
} push;
#define ROPE push.p.rope
#define ROPE_BASE push.base[1]
#include "../rope.glsl"

void main() {
  const uint row = gl_WorkGroupID.x, query = gl_WorkGroupID.y, head = query / push.p.group;
  if (row >= step.n_rows) return;
  const uint entries = step_entries(step, head_states[push.p.head_state + head]) - step.n_rows;
  const uint end = head * (push.p.page_capacity + 1) + page_counts[push.base[2] + head];
  const uint place = push.p.rope.mode == kRopeList ? entries + table[push.base[3] + 4 * end + 3] + row
                                                   : uint(step.position) + row;
  const uint from = push.base[0] + row * push.p.row_stride + query * push.p.head_dim;
  const uint vector = (head * step.n_rows + row) * push.p.group + query % push.p.group;
  for (uint c = gl_LocalInvocationIndex; c < push.p.head_dim; c += gl_WorkGroupSize.x) {
    float x = q[from + c];
    if (c < push.p.rope.n_rot)
      x = rotated(c, x, q[from + partner_of(c)], rope_angle(place, pair_of(c)));
    rotated_q[push.base[4] + vector * push.p.head_dim + c] = x * push.p.scale * query_weight(c);
  }
}
