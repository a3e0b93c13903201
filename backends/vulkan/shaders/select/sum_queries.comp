// token_score, first part for several rows: sums the rotated queries, in slices of the rows.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kHasGate = false;

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 3, std430) readonly buffer Gate { uint gate[]; };
layout(set = 0, binding = 4, std430) writeonly buffer Sums { float sums[]; };  // [slices][query heads * head_dim]
layout(push_constant) uniform Push {
  TokenScoreParams p;
  uint slices;
  uint base[4];
} push;

#define ROPE push.p.rope
#define ROPE_BASE push.base[1]
#include "../rope.glsl"
#include "score_query.glsl"

// Channel c of a query head, counted from the first of first_head, after rotation.
float rotated_channel(uint row, uint query, uint c) {
  const uint at = push.base[0] + row * push.p.row_stride + (push.p.first_head * push.p.group + query) * push.p.head_dim;
  float x = q[at + c];
  if (c < push.p.rope.n_rot) x = rotated(c, x, q[at + partner_of(c)], rope_angle(score_position() + row, pair_of(c)));
  return x * query_weight(c);
}

// One thread per channel of one query head, for the rows of slice gl_WorkGroupID.y.
void main() {
  if (kHasGate && gate[push.base[2]] != 0) return;
  const uint channels = push.p.heads * push.p.group * push.p.head_dim, i = gl_GlobalInvocationID.x;
  if (i >= channels) return;
  const uint head = push.p.first_head + i / (push.p.group * push.p.head_dim);
  if (!selects(step, step_entries(step, head_states[push.p.head_state + head]))) return;
  const uint slice_rows = (step.n_rows + push.slices - 1) / push.slices, first = gl_WorkGroupID.y * slice_rows;
  float sum = 0;
  for (uint row = first; row < min(first + slice_rows, step.n_rows); ++row)
    sum += rotated_channel(row, i / push.p.head_dim, i % push.p.head_dim);
  sums[push.base[3] + gl_WorkGroupID.y * channels + i] = sum;
}
