#version 450
// embed: copies a row of the embedding table for each token. A thread makes four neighbours.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#define BOOKS
#include "../step.glsl"
#include "dense_params.h"
#include "formats.glsl"

layout(local_size_x = 64) in;

layout(set = 0, binding = 1, std430) readonly buffer Tokens { uint tokens[]; };
layout(set = 0, binding = 2, std430) readonly buffer Table { uint table[]; };
layout(set = 0, binding = 3, std430) writeonly buffer X { float x[]; };
layout(set = 0, binding = 4, std430) readonly buffer Books { uint books[]; };
layout(push_constant) uniform Push {
  TableParams p;
  uint base[4];
} push;

uint word_at(uint matrix, uint i) { return table[push.base[1] + i]; }
uint book_word(uint i) { return books[push.base[3] + i]; }

void main() {
  const uint row = gl_WorkGroupID.y, quad = gl_GlobalInvocationID.x, cols = push.p.cols;
  if (row >= step.n_rows || 4 * quad >= cols) return;
  const uint index = (push.p.by_row != 0 ? row : tokens[push.base[0] + row]) - push.p.first_token;
  if (index >= push.p.tokens) return;
  const uint from = push.p.column / 4 + quad;
  const vec4 values = push.p.scale * weights(Row(0, index * push.p.row_bytes, push.p.columns), from / 64,
                                             from / 8 % 8, from % 8);
  const uint to = push.base[2] + row * cols + 4 * quad;
  for (uint i = 0; i < 4 && 4 * quad + i < cols; ++i) x[to + i] = values[i];
}
