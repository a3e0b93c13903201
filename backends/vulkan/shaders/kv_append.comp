// kv_append: the step's k and v rows go into the pool or the chunk buffer.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "half.glsl"
#include "step.glsl"

layout(local_size_x = 128) in;

layout(set = 0, binding = 1, std430) readonly buffer Qkv { float qkv[]; };
layout(set = 0, binding = 2, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 3, std430) buffer K { uint k[]; };  // from first_head on, as v
layout(set = 0, binding = 4, std430) buffer V { uint v[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Pos { int pos[]; };
layout(push_constant) uniform Push {
  KvAppendParams p;
  uint base[5];
} push;

#define ROPE push.p.rope
#define ROPE_BASE push.base[1]
#include "rope.glsl"

// Element i of a head's rows, [n_rows][head_dim], that start at `column` of qkv; 0 outside of them.
uint element(uint column, uint i, bool rotates) {
  const uint row = i / push.p.head_dim, c = i % push.p.head_dim;
  if (row >= step.n_rows) return 0;
  const uint at = push.base[0] + row * push.p.row_stride + column;
  float x = qkv[at + c];
  if (rotates && c < push.p.rope.n_rot)
    x = rotated(c, x, qkv[at + partner_of(c)], rope_angle(uint(step.position) + row, pair_of(c)));
  return to_half(x);
}

// Thread: two elements of k and of v that share a word.
void main() {
  const uint i = gl_GlobalInvocationID.x, head = push.p.first_head + gl_WorkGroupID.y;
  const uint first = push.p.into == kIntoPool ? step.n_entries : 0;
  if (i < step.n_rows) pos[push.base[4] + head * push.p.capacity + first + i] = step.position + int(i);

  const uint n = step.n_rows * push.p.head_dim, start = (gl_WorkGroupID.y * push.p.capacity + first) * push.p.head_dim;
  const uint word = start / 2 + i, low = 2 * word - start, high = low + 1;  // low is -1, a large number, where start is odd
  const bool rotates = push.p.rope.mode == kRopeOriginal;
  const uint k_column = push.p.k_column + head * push.p.head_dim, v_column = push.p.v_column + head * push.p.head_dim;
  const uint new_k = element(k_column, low, rotates) | element(k_column, high, rotates) << 16;
  const uint new_v = element(v_column, low, false) | element(v_column, high, false) << 16;
  if (low < n && high < n) {
    k[push.base[2] + word] = new_k;
    v[push.base[3] + word] = new_v;
  } else if (low < n || high < n) {  // odd sizes alone: the other half is a neighbour's, who may write it now
    const uint others = low < n ? 0xffff0000 : 0xffff;
    atomicAnd(k[push.base[2] + word], others);
    atomicOr(k[push.base[2] + word], new_k);
    atomicAnd(v[push.base[3] + word], others);
    atomicOr(v[push.base[3] + word], new_v);
  }
}
