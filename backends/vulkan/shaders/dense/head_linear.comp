// head_linear: a workgroup computes a tile of one head's outputs. Slices of x and of the head's matrix, 32
// inputs each, pass through shared memory as floats.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#define BOOKS
#include "../step.glsl"
#include "formats.glsl"

const uint kThreads = 128;
layout(local_size_x = 128) in;
layout(constant_id = 1) const bool kTransposed = false;  // HeadLinearParams
layout(constant_id = 2) const uint kRows = 16;            // of a tile: 1 or a multiple of 2

layout(set = 0, binding = 1, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = 2, std430) readonly buffer W { uint w[]; };
layout(set = 0, binding = 3, std430) writeonly buffer Y { float y[]; };
layout(set = 0, binding = 4, std430) readonly buffer Books { uint books[]; };
layout(push_constant) uniform Push {
  HeadLinearParams p;
  uint row_bytes;  // per row of the matrix
  float scale;
  uint base[4];
} push;

uint word_at(uint matrix, uint i) { return w[push.base[1] + i]; }
uint book_word(uint i) { return books[push.base[3] + i]; }

const uint kCols = 64, kDepth = 32, kStride = kCols + 1;
shared float x_slice[kRows * kDepth];
shared float w_slice[kDepth * kStride];  // [input][output]

// With one row, the two halves of the threads share the depth; otherwise they share the rows.
const bool kOneRow = kRows == 1;
const uint kRowsEach = kOneRow ? 1 : kRows / 2, kDepthEach = kOneRow ? kDepth / 2 : kDepth;

// Four neighbours of a row of the head's matrix.
vec4 quad_of(uint head, uint row, uint col) {
  const uint from = push.p.w_first + head * push.p.w_head_rows + row;
  return weights(Row(0, from * push.row_bytes, kTransposed ? push.p.out_cols : push.p.in_cols), col / 256,
                 col / 32 % 8, col / 4 % 8);
}

void load_slices(uint head, uint first_row, uint first_out, uint first_in) {
  for (uint i = gl_LocalInvocationIndex; i < kRows * kDepth; i += kThreads) {
    const uint row = first_row + i / kDepth, at = first_in + i % kDepth;
    const bool there = row < step.n_rows && at < push.p.in_cols;
    x_slice[i] = there ? x[push.base[0] + row * push.p.x_stride + head * push.p.x_head_stride + at] : 0;
  }
  const uint quads = (kTransposed ? kCols : kDepth) / 4;  // of a line
  for (uint i = gl_LocalInvocationIndex; i < kDepth * kCols / 4; i += kThreads) {
    const uint line = i / quads, four = i % quads * 4;
    const uint at = kTransposed ? line : four, o = kTransposed ? four : line;
    vec4 values = vec4(0);
    if (first_in + at < push.p.in_cols && first_out + o < push.p.out_cols)
      values = quad_of(head, kTransposed ? first_in + at : first_out + o,
                       kTransposed ? first_out + o : first_in + at);
    [[unroll]] for (uint e = 0; e < 4; ++e)
      w_slice[kTransposed ? at * kStride + o + e : (at + e) * kStride + o] = values[e];
  }
}

void main() {
  const uint head = gl_WorkGroupID.z, first_row = gl_WorkGroupID.y * kRows, first_out = gl_WorkGroupID.x * kCols;
  const uint thread = gl_LocalInvocationIndex, col = thread % kCols, side = thread / kCols;
  if (first_row >= step.n_rows) return;
  float sums[kRowsEach];
  [[unroll]] for (uint r = 0; r < kRowsEach; ++r) sums[r] = 0;
  for (uint first_in = 0; first_in < push.p.in_cols; first_in += kDepth) {
    if (first_in > 0) barrier();  // the previous slices are no longer read
    load_slices(head, first_row, first_out, first_in);
    barrier();
    const uint from_row = kOneRow ? 0 : side * kRowsEach, from_depth = kOneRow ? side * kDepthEach : 0;
    for (uint d = from_depth; d < from_depth + kDepthEach; ++d) {
      const float weight = w_slice[d * kStride + col];
      [[unroll]] for (uint r = 0; r < kRowsEach; ++r) sums[r] += x_slice[(from_row + r) * kDepth + d] * weight;
    }
  }
  if (kOneRow) {
    barrier();
    if (side == 1) w_slice[col] = sums[0];
    barrier();
    sums[0] += w_slice[col];
  }
  [[unroll]] for (uint r = 0; r < kRowsEach; ++r) {
    const uint row = first_row + (kOneRow ? 0 : side * kRowsEach) + r, o = first_out + col;
    if (row >= step.n_rows || o >= push.p.out_cols || (kOneRow && side == 1)) continue;
    y[push.base[2] + row * push.p.y_stride + head * push.p.y_head_stride + push.p.copied + o] = push.scale * sums[r];
  }
  if (gl_WorkGroupID.x > 0) return;
  for (uint i = thread; i < kRows * push.p.copied; i += kThreads) {
    const uint row = first_row + i / push.p.copied, c = i % push.p.copied;
    if (row >= step.n_rows) break;
    const uint from = push.base[0] + row * push.p.x_stride + head * push.p.x_head_stride + push.p.in_cols;
    y[push.base[2] + row * push.p.y_stride + head * push.p.y_head_stride + c] = x[from + c];
  }
}
