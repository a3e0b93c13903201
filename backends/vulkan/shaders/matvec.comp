#version 450
// linear and glu for few rows: a workgroup reads some rows of W once, which is what takes time, and multiplies them with as
// many rows of x as it is for.
//
// A thread takes pieces of 32 columns. It has the numbers of x in registers for all rows of W that the workgroup reads, a few
// at a time, and multiplies these while the next are on their way.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#ifdef DIGITS
#extension GL_EXT_spirv_intrinsics : require
#endif
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_basic : require

#define kOperands 5
#include "operands.glsl"

layout(local_size_x_id = 6) in;  // a multiple of 8 and of kLanes
const uint kThreads = gl_WorkGroupSize.x;
layout(constant_id = 3) const uint kBatch = 4;     // lines that are multiplied while the next ones are under way
layout(constant_id = 4) const uint kRows = 1;      // of y in a workgroup
layout(constant_id = 5) const uint kMatrices = 1;  // 2: w is glu's gate, and this is its up
layout(constant_id = 7) const uint kBatches = 1;   // of a workgroup
layout(constant_id = 8) const uint kLanes = 32;    // of a subgroup

layout(set = 0, binding = 2, std430) readonly buffer WQuads { uvec4 w_quads[]; };
layout(set = 0, binding = 5, std430) readonly buffer Up { uint up[]; };
layout(set = 0, binding = 5, std430) readonly buffer UpQuads { uvec4 up_quads[]; };

const uint kLines = kBatch * kBatches;     // rows of W, of both matrices in turns
const uint kCols = kLines / kMatrices;     // of y
const uint kSubgroups = kThreads / kLanes;

uint word_at(uint matrix, uint i) { return matrix == 0 ? w[push.base[1] + i] : up[push.base[4] + i]; }
// Matrices start at multiples of 16 bytes (DeviceInfo::alignment).
uvec4 words_at(uint matrix, uint quad) {
  return matrix == 0 ? w_quads[push.base[1] / 4 + quad] : up_quads[push.base[4] / 4 + quad];
}

// The first row and column of the workgroup, and how many rows there are.
uint first_row, first_col, rows;
// The thread's place in the workgroup, the lanes of a subgroup in a row.
uint thread;

// Where a line starts in its matrix, in bytes. Columns of y that there are not repeat the last.
uint line_start(uint line) { return min(first_col + line / kMatrices, push.p.out_cols - 1) * push.p.row_bytes; }

#include "pieces.glsl"

shared float subgroup_sums[kRows * kLines * kSubgroups];

// Adds what the lanes of a subgroup have to the sum of a row and a line.
void add_up(uint row, uint line, float product, bool first) {
  const float sum = subgroupAdd(product);
  const uint at = (row * kLines + line) * kSubgroups + gl_SubgroupID;
  if (subgroupElect()) subgroup_sums[at] = first ? sum : subgroup_sums[at] + sum;
}

// Blocks: pieces in turns, and for each batches of lines.
void multiply_pieces() {
  const uint pieces = push.p.in_cols / 32;
  fetch(0, 0);
  for (uint first = 0; first < pieces; first += kThreads) {
    const uint piece = min(first + thread, pieces - 1);
    const bool mine = first + thread < pieces;
    const Columns of_first_row = columns_of(first_row, piece);
    for (uint b = 0; b < kBatches; ++b) {
      take_fetched();
      const bool last = b + 1 == kBatches;
      const uint next = last ? first + kThreads : first;
      if (next < pieces) fetch(next, last ? 0 : (b + 1) * kBatch);
      [[unroll]] for (uint r = 0; r < kRows; ++r) {
        if (r >= rows) break;
        Columns columns = of_first_row;
        if (r > 0) columns = columns_of(first_row + r, piece);
        [[unroll]] for (uint l = 0; l < kBatch; ++l) {
          const float product = piece_product(l, b * kBatch + l, first, columns);
          add_up(r, b * kBatch + l, mine ? product : 0, first == 0);
        }
      }
    }
  }
}

// Floats: eight threads share 256 columns and have four of each 32.
void multiply_floats() {
  const uint quad = thread % 8, groups = (push.p.in_cols + 31 - 4 * quad) / 32;
  for (uint b = 0; b < kBatches; ++b) {
    float sums[kRows * kBatch];
    [[unroll]] for (uint s = 0; s < kRows * kBatch; ++s) sums[s] = 0;
    for (uint group = thread / 8; group < groups; group += kThreads / 8) {
      vec4 of_x[kRows];
      [[unroll]] for (uint r = 0; r < kRows; ++r)
        of_x[r] = x_at(first_row + min(r, rows - 1), 32 * group + 4 * quad);
      [[unroll]] for (uint l = 0; l < kBatch; ++l) {
        const uint line = b * kBatch + l;
        const vec4 of_w = weights(Row(line % kMatrices, line_start(line), push.p.in_cols), 0, group, quad);
        [[unroll]] for (uint r = 0; r < kRows; ++r)
          sums[r * kBatch + l] = add_products(sums[r * kBatch + l], of_x[r], of_w);
      }
    }
    [[unroll]] for (uint s = 0; s < kRows * kBatch; ++s) add_up(s / kBatch, b * kBatch + s % kBatch, sums[s], true);
  }
}

float group_sum(uint sum) {
  float total = 0;
  for (uint i = 0; i < kSubgroups; ++i) total += subgroup_sums[sum * kSubgroups + i];
  return total;
}

void main() {
  first_col = gl_WorkGroupID.x * kCols;
  first_row = gl_WorkGroupID.y * kRows;
  const uint all_rows = product_rows();
  if (first_row >= all_rows) return;
  rows = min(all_rows - first_row, kRows);

  thread = gl_SubgroupID * kLanes + gl_SubgroupInvocationID;

  if (kPlain)
    multiply_floats();
  else
    multiply_pieces();
  barrier();
  for (uint i = thread; i < rows * kCols; i += kThreads) {
    const uint row = i / kCols, col = i % kCols;
    if (first_col + col >= push.p.out_cols) continue;
    float sum = group_sum(i * kMatrices);
    if (kMatrices == 2) sum = activate(sum, push.p.act) * group_sum(i * kMatrices + 1);
    store(first_row + row, first_col + col, sum);
  }
}
