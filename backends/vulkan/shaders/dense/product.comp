#version 450
// linear and glu for many rows: a workgroup computes a tile of y in f32. Slices of x and W, 32 columns each,
// pass through shared memory, where x is f32 and W f16. With 16 x 8 elements per thread, eight of its columns
// take 1024 products and 40 reads of 16 bytes from shared memory; an H200 can do at most 64 reads in that
// time (4 cycles per read, with 4 products in each).
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

#ifdef EXPERTS
#define kOperands 9
#else
#define kOperands 5
#endif
#define BOOKS
#include "operands.glsl"

uint word_at(uint matrix, uint i) { return w[push.base[1] + i]; }

layout(local_size_x_id = 5) in;                      // a multiple of kColThreads
layout(constant_id = 3) const uint kThreadRows = 16;  // rows of y per thread, with kThreadCols columns
layout(constant_id = 4) const uint kThreadCols = 8;
layout(constant_id = 6) const bool kWhole = false;    // in_cols is a multiple of a slice
// Rows of W are f16 and multiples of a slice, with zeros from in_cols on
layout(constant_id = 7) const bool kInEights = false;

// Read word by word, f16 products take an H200 16 % longer.
layout(set = 0, binding = 2, std430) readonly buffer WInEights { uvec4 w_eights[]; };

const uint kThreads = gl_WorkGroupSize.x, kColThreads = 16, kRowThreads = kThreads / kColThreads;
const uint kCols = kThreadCols * kColThreads, kRows = kThreadRows * kRowThreads;  // of the tile
// A quad is four columns of x, an eight is eight columns of W. kQuads and kEights are their numbers per
// slice; kQuadLines and kEightLines are the lines that are copied at a time.
const uint kQuads = 8, kQuadLines = kThreads / kQuads, kEights = 4, kEightLines = kThreads / kEights;

shared vec4 x_slice[kRows * kQuads];
shared uvec4 w_slice[kCols * kEights];

// Their positions in shared memory, chosen so that the same quad of eight neighbouring lines is in 32
// different banks.
uint quad_at(uint line, uint quad) { return line * kQuads + (quad ^ line % kQuads); }
uint eight_at(uint line, uint eight) { return line * kEights + (eight ^ line / 2 % kEights); }

#ifdef EXPERTS
layout(constant_id = 8) const uint kLanes = 32;  // lanes per subgroup
#include "find_expert.glsl"

bool find_rows(out uint first_row, out uint rows) { return find_seen_tile(gl_WorkGroupID.y, kRows, first_row, rows); }
uint x_rows[kRows / kQuadLines];  // rows that a thread copies from
uint copied_row(uint copy, uint row) { return x_rows[copy]; }
#else
uint copied_row(uint copy, uint row) { return row; }
bool find_rows(out uint first_row, out uint rows) {
  first_row = gl_WorkGroupID.y * kRows;
  rows = product_rows();
  return first_row < rows;
}
#endif

void main() {
  const uint first_col = gl_WorkGroupID.x * kCols;
  uint first_row, rows;
  if (!find_rows(first_row, rows)) return;
  const uint last_col = push.p.out_cols - 1, last_row = rows - 1;

  const uint thread = gl_LocalInvocationIndex;
  const uint quad = thread % kQuads, quad_line = thread / kQuads;      // for copying
  const uint eight = thread % kEights, eight_line = thread / kEights;
  const uint col = thread % kColThreads, row = thread / kColThreads;  // in the tile

#ifdef EXPERTS
  [[unroll]] for (uint i = 0; i < kRows / kQuadLines; ++i) x_rows[i] = x_row(min(first_row + quad_line + i * kQuadLines, last_row));
#endif
  float sums[kThreadRows][kThreadCols];
  [[unroll]] for (uint r = 0; r < kThreadRows; ++r)
    [[unroll]] for (uint c = 0; c < kThreadCols; ++c) sums[r][c] = 0;

  for (uint group = 0; 32 * group < push.p.in_cols; ++group) {
    // Lines after the last repeat the last one; columns after the end are zeros. If in_cols is a multiple of
    // a slice there is no branch per column, and loads are issued together.
    vec4 of_x[kRows / kQuadLines];
    uvec4 of_w[kCols / kEightLines];
    [[unroll]] for (uint i = 0; i < kRows / kQuadLines; ++i) {
      const uint x_col = 32 * group + 4 * quad;
      const uint x_line = copied_row(i, min(first_row + quad_line + i * kQuadLines, last_row));
      of_x[i] = kWhole || x_col < push.p.in_cols ? x_at(x_line, x_col) : vec4(0);
    }
    [[unroll]] for (uint i = 0; i < kCols / kEightLines; ++i) {
      const uint w_row = matrix_row(min(first_col + eight_line + i * kEightLines, last_col));
      if (kInEights) {
        of_w[i] = w_eights[push.base[1] / 4 + w_row * (push.p.row_bytes / 16) + kEights * group + eight];
        continue;
      }
      const Row from = Row(0, w_row * push.p.row_bytes, push.p.in_cols);
      vec4 halves[2] = {vec4(0), vec4(0)};
      [[unroll]] for (uint h = 0; h < 2; ++h)
        if (kWhole || 32 * group + 8 * eight + 4 * h < push.p.in_cols)
          halves[h] = weights(from, group / 8, group % 8, 2 * eight + h);
      of_w[i] = pack_eight(halves[0], halves[1]);
    }
    if (group > 0) barrier();  // the previous data is no longer read
    [[unroll]] for (uint i = 0; i < kRows / kQuadLines; ++i) x_slice[quad_at(quad_line + i * kQuadLines, quad)] = of_x[i];
    [[unroll]] for (uint i = 0; i < kCols / kEightLines; ++i) w_slice[eight_at(eight_line + i * kEightLines, eight)] = of_w[i];
    barrier();
    for (uint e = 0; e < kEights; ++e) {
      // A thread's lines are multiples of 8 apart, so the position within them is the same.
      const uint w_first = eight_at(col, e);
      uvec4 eights[kThreadCols];
      [[unroll]] for (uint c = 0; c < kThreadCols; ++c) eights[c] = w_slice[w_first + c * kColThreads * kEights];
      [[unroll]] for (uint h = 0; h < 2; ++h) {
        const uint x_first = quad_at(row, 2 * e + h);
        vec4 cols[kThreadCols];
        [[unroll]] for (uint c = 0; c < kThreadCols; ++c)
          cols[c] = vec4(unpackHalf2x16(eights[c][2 * h]), unpackHalf2x16(eights[c][2 * h + 1]));
        [[unroll]] for (uint r = 0; r < kThreadRows; ++r) {
          const vec4 quad_of_x = x_slice[x_first + r * kRowThreads * kQuads];
          [[unroll]] for (uint c = 0; c < kThreadCols; ++c) sums[r][c] = add_products(sums[r][c], quad_of_x, cols[c]);
        }
      }
    }
  }

  [[unroll]] for (uint r = 0; r < kThreadRows; ++r)
    [[unroll]] for (uint c = 0; c < kThreadCols; ++c) {
      const uint y_row = first_row + row + r * kRowThreads, y_col = first_col + col + c * kColThreads;
      if (y_row < rows && y_col < push.p.out_cols) store(y_row, y_col, sums[r][c]);
    }
}
