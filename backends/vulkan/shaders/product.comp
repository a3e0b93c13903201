#version 450
// linear and glu for many rows: a workgroup makes a tile of y, in f32. A slice of x and one of W, 32 columns each, pass
// through shared memory, where W becomes floats. With 8 x 8 elements to a thread four of its columns cost 256 products and 16
// reads of shared memory.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

#define kOperands 4
#include "operands.glsl"

uint word_at(uint matrix, uint i) { return w[push.base[1] + i]; }

layout(local_size_x_id = 5) in;                      // a multiple of kColThreads
layout(constant_id = 3) const uint kThreadRows = 8;  // of y that a thread makes, in kThreadCols columns
layout(constant_id = 4) const uint kThreadCols = 8;

const uint kThreads = gl_WorkGroupSize.x, kColThreads = 16, kRowThreads = kThreads / kColThreads;
const uint kCols = kThreadCols * kColThreads, kRows = kThreadRows * kRowThreads;  // of the tile
const uint kQuads = 8;  // of columns in a slice: element 4 quad and the three behind it
const uint kCopied = kThreads / kQuads;  // copied at a time

shared vec4 x_slice[kRows * kQuads];
shared vec4 w_slice[kCols * kQuads];

// Where a quad lies in a slice, so that the same quad of eight neighbouring lines lies in 32 different banks.
uint place(uint line, uint quad) { return line * kQuads + (quad ^ line % kQuads); }

void main() {
  const uint first_col = gl_WorkGroupID.x * kCols, first_row = gl_WorkGroupID.y * kRows, rows = product_rows();
  if (first_row >= rows) return;
  const uint last_col = push.p.out_cols - 1, last_row = rows - 1;

  const uint thread = gl_LocalInvocationIndex;
  const uint quad = thread % kQuads, line = thread / kQuads;          // when copying
  const uint col = thread % kColThreads, row = thread / kColThreads;  // of the tile

  float sums[kThreadRows][kThreadCols];
  [[unroll]] for (uint r = 0; r < kThreadRows; ++r)
    [[unroll]] for (uint c = 0; c < kThreadCols; ++c) sums[r][c] = 0;

  for (uint group = 0; 32 * group < push.p.in_cols; ++group) {
    // Lines that there are not repeat the last, columns behind the end are zeros.
    const bool within = 32 * group + 4 * quad < push.p.in_cols;
    vec4 of_x[kRows / kCopied], of_w[kCols / kCopied];
    [[unroll]] for (uint i = 0; i < kRows / kCopied; ++i)
      of_x[i] = within ? x_at(min(first_row + line + i * kCopied, last_row), 32 * group + 4 * quad) : vec4(0);
    [[unroll]] for (uint i = 0; i < kCols / kCopied; ++i) {
      const Row from = Row(0, min(first_col + line + i * kCopied, last_col) * push.p.row_bytes, push.p.in_cols);
      of_w[i] = within ? weights(from, group / 8, group % 8, quad) : vec4(0);
    }
    if (group > 0) barrier();  // all have read what was there
    [[unroll]] for (uint i = 0; i < kRows / kCopied; ++i) x_slice[place(line + i * kCopied, quad)] = of_x[i];
    [[unroll]] for (uint i = 0; i < kCols / kCopied; ++i) w_slice[place(line + i * kCopied, quad)] = of_w[i];
    barrier();
    for (uint q = 0; q < kQuads; ++q) {
      // A thread's lines are multiples of 8 apart: the place within them is the same.
      const uint w_first = place(col, q), x_first = place(row, q);
      vec4 cols[kThreadCols];
      [[unroll]] for (uint c = 0; c < kThreadCols; ++c) cols[c] = w_slice[w_first + c * kColThreads * kQuads];
      [[unroll]] for (uint r = 0; r < kThreadRows; ++r) {
        const vec4 quad_of_x = x_slice[x_first + r * kRowThreads * kQuads];
        [[unroll]] for (uint c = 0; c < kThreadCols; ++c) sums[r][c] = add_products(sums[r][c], quad_of_x, cols[c]);
      }
    }
  }

  [[unroll]] for (uint r = 0; r < kThreadRows; ++r)
    [[unroll]] for (uint c = 0; c < kThreadCols; ++c) {
      const uint y_row = first_row + row + r * kRowThreads, y_col = first_col + col + c * kColThreads;
      if (y_row < rows && y_col < push.p.out_cols) store(y_row, y_col, sums[r][c]);
    }
}
