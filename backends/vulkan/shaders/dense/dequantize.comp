#version 450
// linear, glu and experts for more than one row, first part: converts rows of W to f16. A thread makes eight
// neighbours.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#define BOOKS
#include "dense_params.h"
#include "formats.glsl"

layout(local_size_x = 128) in;

layout(set = 0, binding = 1, std430) readonly buffer W { uint w[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Halves { uvec4 halves[]; };  // [rows][depth] f16
layout(set = 0, binding = 3, std430) readonly buffer Books { uint books[]; };
#ifdef EXPERTS
#define kOperands 4
layout(set = 0, binding = 4, std430) readonly buffer First { uint first_slots[]; };
#else
#define kOperands 3
#endif
layout(push_constant) uniform Push {
  DequantizeParams p;
  uint base[kOperands];
} push;

uint word_at(uint matrix, uint i) { return w[push.base[0] + i]; }
uint book_word(uint i) { return books[push.base[2] + i]; }

void main() {
  const uint e = gl_GlobalInvocationID.x, eights = push.p.depth / 8;
  uint from = gl_WorkGroupID.y, to = gl_WorkGroupID.y;
#ifdef EXPERTS
  // Experts that no row chose are skipped.
  const uint expert = gl_WorkGroupID.z, slot = push.base[3] + push.p.first_expert + expert;
  if (first_slots[slot] == first_slots[slot + 1]) return;
  from += expert * push.p.from_rows;
  to += expert * push.p.to_rows;
#endif
  if (e >= eights) return;
  const Row of_w = Row(0, from * push.p.row_bytes, push.p.in_cols);
  const uint unit = e / 32, group = e / 4 % 8, quad = e % 4 * 2;
  const vec4 low = weights(of_w, unit, group, quad), high = weights(of_w, unit, group, quad + 1);
  halves[push.base[1] / 4 + to * eights + e] = pack_eight(low, high);
}
