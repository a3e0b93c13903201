// The norms of a token's queries and keys, head by head, and its kv_append. A workgroup normalises a head's
// vector in place, and appends it if it is a key; others append values.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#define KV_FORMAT_ID 3
#include "../kv_format.glsl"
#include "../step.glsl"
#include "kv_params.h"

layout(local_size_x_id = 0) in;
const uint kThreads = gl_WorkGroupSize.x;
layout(constant_id = 1) const uint kHeadDim = 128;    // even
layout(constant_id = 2) const bool kRotates = false;  // keys, under kRopeOriginal
#include "../reduce.glsl"

layout(set = 0, binding = 1, std430) buffer Qkv { float qkv[]; };
layout(set = 0, binding = 2, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 3, std430) writeonly buffer K { uint k[]; };
layout(set = 0, binding = 4, std430) writeonly buffer V { uint v[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Pos { int pos[]; };
layout(set = 0, binding = 6, std430) buffer Saturated { uint saturated[]; };
layout(set = 0, binding = 7, std430) readonly buffer QNorm { float q_norm[]; };
layout(set = 0, binding = 8, std430) readonly buffer KNorm { float k_norm[]; };
layout(push_constant) uniform Push {
  NormAppendParams p;
  uint base[8];
} push;

#define ROPE push.p.append.rope
#define ROPE_BASE push.base[1]
#include "../rope.glsl"

shared float vector[kHeadDim];
uint beyond = 0;  // among a thread's elements

// The bits of a channel of the key or value.
uint element(uint c, bool of_k) {
  float x = vector[c];
  if (kRotates && of_k && c < ROPE.n_rot)
    x = rotated(c, x, vector[partner_of(c)], rope_angle(uint(step.position), pair_of(c)));
  return kv_bits(x, beyond);
}

void main() {
  if (step.n_rows == 0) return;
  const KvAppendParams p = push.p.append;
  const uint behind_q = gl_WorkGroupID.x - push.p.query_heads, thread = gl_LocalInvocationIndex;
  const bool of_q = gl_WorkGroupID.x < push.p.query_heads, of_k = !of_q && behind_q < p.heads;
  const uint head = of_q ? gl_WorkGroupID.x : of_k ? behind_q : behind_q - p.heads;
  const uint from = push.base[0] + (of_q ? 0 : of_k ? p.k_column : p.v_column) + head * kHeadDim;

  const uint kEach = (kHeadDim + kThreads - 1) / kThreads;
  float own[kEach];
  float squares = 0;
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const uint c = i * kThreads + thread;
    own[i] = c < kHeadDim ? qkv[from + c] : 0;
    squares += own[i] * own[i];
  }
  if (of_q || of_k) {
    const float scale = inversesqrt(group_sum(squares) / float(kHeadDim) + push.p.eps);
    [[unroll]] for (uint i = 0; i < kEach; ++i) {
      const uint c = i * kThreads + thread;
      if (c >= kHeadDim) continue;
      own[i] = own[i] * scale * (of_q ? q_norm[push.base[6] + c] : k_norm[push.base[7] + c]);
      qkv[from + c] = own[i];
    }
    if (of_q) return;
  }
  [[unroll]] for (uint i = 0; i < kEach; ++i)
    if (i * kThreads + thread < kHeadDim) vector[i * kThreads + thread] = own[i];
  barrier();

  const HeadState state = head_states[p.head_state + head];
  const uint entry = state.first + state.n_entries;
  if (of_k && thread == 0) pos[push.base[4] + entry] = step.position;
  for (uint w = thread; w < kHeadDim / 2; w += kThreads) {
    const uint both = kv_word(element(2 * w, of_k), element(2 * w + 1, of_k)), to = entry * KV_ROW_WORDS(kHeadDim) + w;
    if (of_k)
      k[push.base[2] + to] = both;
    else
      v[push.base[3] + to] = both;
  }
  if (beyond > 0) atomicAdd(saturated[push.base[5]], beyond);
}
