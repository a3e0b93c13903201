// label, first dispatch: one workgroup per row. If the row is marked, its queries are rotated, scaled, and
// stored after those of the marked rows before it.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kHasX = false;

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer Marked { uint marked[]; };
layout(set = 0, binding = 3, std430) readonly buffer RopeTable { float rope_table[]; };
layout(set = 0, binding = 4, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Queries { float queries[]; };
layout(set = 0, binding = 6, std430) writeonly buffer Found { uint found[]; };
layout(push_constant) uniform Push {
  LabelParams p;
  uint max_rows;
  uint base[6];
} push;

#define ROPE push.p.rope
#define ROPE_BASE push.base[2]
#include "../rope.glsl"

shared float of_threads[128];

// The sum over all threads, always in the same order.
float sum_of_threads(float own) {
  barrier();
  of_threads[gl_LocalInvocationIndex] = own;
  for (uint apart = 64; apart > 0; apart /= 2) {
    barrier();
    if (gl_LocalInvocationIndex < apart)
      of_threads[gl_LocalInvocationIndex] += of_threads[gl_LocalInvocationIndex + apart];
  }
  barrier();
  return of_threads[0];
}

void main() {
  const uint row = gl_WorkGroupID.x, thread = gl_LocalInvocationIndex;
  if (row >= step.n_rows) return;
  float count = 0;  // exact
  for (uint r = thread; r < row; r += 128) count += marked[push.base[1] + r] != 0 ? 1 : 0;
  const uint before = uint(sum_of_threads(count));
  const bool is_marked = marked[push.base[1] + row] != 0;
  if (row == step.n_rows - 1 && thread == 0) found[push.base[5]] = before + (is_marked ? 1 : 0);
  if (!is_marked) return;

  float squares = 0;
  if (kHasX)
    for (uint c = thread; c < push.p.x_cols; c += 128) {
      const float of_row = x[push.base[3] + row * push.p.x_cols + c];
      squares += of_row * of_row;
    }
  squares = sum_of_threads(squares);
  if (thread == 0) {
    found[push.base[5] + 1 + before] = row;
    found[push.base[5] + 1 + push.max_rows + before] = floatBitsToUint(kHasX ? 0.5 * log(squares) : 0);
  }
  const uint position = uint(step.position) + row, dim = push.p.head_dim, group = push.p.group;
  for (uint i = thread; i < push.p.heads * group * dim; i += 128) {
    const uint query = i / dim, c = i % dim, start = push.base[0] + row * push.p.row_stride + query * dim;
    float z = q[start + c];
    if (c < push.p.rope.n_rot) z = rotated(c, z, q[start + partner_of(c)], rope_angle(position, pair_of(c)));
    z *= query_weight(c);
    const uint vector = query / group * push.max_rows * group + before * group + query % group;
    queries[push.base[4] + vector * dim + c] = z * push.p.scale;
  }
}
