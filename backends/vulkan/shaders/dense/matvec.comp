#version 450
// linear and glu for few rows: a workgroup reads some rows of W once, which dominates the time, and
// multiplies them with kRows rows of x.
//
// A thread processes pieces of 32 columns. It keeps the numbers of x in registers for all rows of W that the
// workgroup reads, and multiplies these while the next ones are loaded.
//
// A norm between two products is computed by both. The first product writes y times the norm's weight, and
// sums of squares of y; the others multiply that, and apply the norm's scale at the end.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#ifdef DIGITS
#extension GL_EXT_spirv_intrinsics : require
#endif
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

#ifdef EXPERTS
#define kOperands 12
#else
#define kOperands 10
#endif
#include "operands.glsl"

layout(local_size_x_id = 6) in;  // a multiple of 8 and of kLanes
const uint kThreads = gl_WorkGroupSize.x;
// Rows of W, of both matrices in turn: a multiple of 4, and 4 without pieces
layout(constant_id = 3) const uint kLines = 8;
layout(constant_id = 4) const uint kRows = 1;      // rows of y per workgroup
layout(constant_id = 5) const uint kMatrices = 1;  // 2: w is the gate of a glu, and there is an up
layout(constant_id = 7) const uint kLanes = 32;    // lanes per subgroup
layout(constant_id = 8) const uint kTogether = 1;  // lines per iteration of the loop: 1, 2 or 4
#ifdef EXPERTS
// y is the sum over this many slots; 0: each slot has its own row
layout(constant_id = 9) const uint kChosen = 0;
// Slots that are multiplied at once, with the same number of threads each
layout(constant_id = 10) const uint kTeams = 1;
layout(constant_id = 11) const bool kPrepares = false;  // the norm of y, if y is a sum over slots
layout(constant_id = 12) const uint kExperts = 1;       // number of experts, among which a glu chooses itself
layout(constant_id = 13) const uint kRouted = 0;        // how many it chooses; 0: they are already chosen
layout(constant_id = 14) const bool kHasRouteBias = false;
layout(constant_id = 15) const uint kGroups = 1;
layout(constant_id = 16) const uint kGroupsUsed = 1;
const bool kHasEach = false;  // there is no room for another operand
#else
const uint kTeams = 1;
#endif

layout(set = 0, binding = 2, std430) readonly buffer WQuads { uvec4 w_quads[]; };
layout(set = 0, binding = 5, std430) readonly buffer Up { uint up[]; };
layout(set = 0, binding = 5, std430) readonly buffer UpQuads { uvec4 up_quads[]; };
#ifdef EXPERTS
// A glu has other operands at these bindings, which a norm does not need.
layout(set = 0, binding = 5, std430) writeonly buffer SquaresOfY { float squares_of_y[]; };
layout(set = 0, binding = 7, std430) writeonly buffer Norm { float norm[]; };
layout(set = 0, binding = 8, std430) readonly buffer NormWeight { float norm_weight[]; };
layout(set = 0, binding = 9, std430) readonly buffer WeightOfSlot { float weight_of_slot[]; };
const uint kSquares = 4, kPrepared = 6, kNormWeight = 7;  // indices into push.base
// A glu may choose the experts itself, and write the results of route for later ops.
layout(set = 0, binding = 6, std430) writeonly buffer FirstMade { uint first_made[]; };
layout(set = 0, binding = 7, std430) writeonly buffer RowMade { uint row_made[]; };
layout(set = 0, binding = 9, std430) writeonly buffer WeightMade { float weight_made[]; };
layout(set = 0, binding = 10, std430) readonly buffer Logits { float logits[]; };
layout(set = 0, binding = 11, std430) readonly buffer RouteBias { float route_biases[]; };
#else
const uint kSquares = 8, kPrepared = 6, kNormWeight = 7;
// Sums of kSquaresEach squares each
layout(set = 0, binding = 6, std430) readonly buffer SquaresOfX { vec4 squares_of_x[]; };
layout(set = 0, binding = 7, std430) writeonly buffer Norm { float norm[]; };  // of x, or the prepared norm
layout(set = 0, binding = 8, std430) readonly buffer NormWeight { float norm_weight[]; };
layout(set = 0, binding = 9, std430) writeonly buffer SquaresOfY { float squares_of_y[]; };
#endif

const uint kCols = kLines / kMatrices;     // columns of y
const uint kSubgroups = kThreads / kLanes;
const uint kShare = kThreads / kTeams;     // threads that share a line

uint word_at(uint matrix, uint i) { return matrix == 0 ? w[push.base[1] + i] : up[push.base[4] + i]; }
// Matrices begin at multiples of 16 bytes (DeviceInfo::alignment).
uvec4 words_at(uint matrix, uint quad) {
  return matrix == 0 ? w_quads[push.base[1] / 4 + quad] : up_quads[push.base[4] / 4 + quad];
}

// The first row and column of the workgroup, and its number of rows.
uint first_row, first_col, rows;
// The thread's index in the workgroup, in subgroup order, and among the threads that share its lines.
uint place, thread;
void find_place() {
  place = gl_SubgroupID * kLanes + gl_SubgroupInvocationID;
  thread = kTeams == 1 ? place : place % kShare;
}

// The byte offset of a line in its matrix. Columns beyond the last repeat the last one.
uint line_start(uint line) {
  return matrix_row(min(first_col + line / kMatrices, push.p.out_cols - 1)) * push.p.row_bytes;
}

#include "../lanes.glsl"
#include "pieces.glsl"

shared float subgroup_sums[kRows * kLines * kSubgroups];
shared float squares_of_cols[kCols];
#ifndef EXPERTS
shared float subgroup_squares[kSubgroups];
#endif

// Sums of two lines at once: half of the lanes add up the first, the others the second.
float exchanged(float first, float second, uint apart) {
  const bool takes_second = (gl_SubgroupInvocationID & apart) != 0;
  return (takes_second ? second : first) + subgroupShuffleXor(takes_second ? first : second, apart);
}
// Adds the lanes' products of a line to the sum of a row, four lines at once: that takes 6 exchanges, while
// separate sums take 20.
float first_line[kRows], first_lines[kRows];
void add_up(uint row, uint line, float product, bool first) {
  if (line % 2 == 0) {
    first_line[row] = product;
    return;
  }
  const float lines = exchanged(first_line[row], product, 1);
  if (line % 4 == 1) {
    first_lines[row] = lines;
    return;
  }
  float sum = exchanged(first_lines[row], lines, 2);
  [[unroll]] for (uint apart = 4; apart < kLanes; apart *= 2) sum += subgroupShuffleXor(sum, apart);
  if (gl_SubgroupInvocationID >= 4) return;
  const uint at = (row * kLines + line - 3 + gl_SubgroupInvocationID) * kSubgroups + gl_SubgroupID;
  subgroup_sums[at] = first ? sum : subgroup_sums[at] + sum;
}

// Line `l` of an iteration, for the thread's piece. NVIDIA's compiler keeps fetched data in memory if `l` is
// a loop variable.
void multiply_line(uint turn, uint l, uint first, Columns of_first_row) {
  const uint line = turn * kTogether + l, pieces = push.p.in_cols / 32;
  take_fetched(l);
  const bool last = line + kTogether >= kLines;
  const uint next = last ? first + kShare : first;
  if (next < pieces) fetch(l, next, line + kTogether - (last ? kLines : 0));
  [[unroll]] for (uint r = 0; r < kRows; ++r) {
    if (r > 0 && r >= rows) break;
    Columns columns = of_first_row;
    if (r > 0) columns = columns_of(first_row + r, min(first + thread, pieces - 1));
    const float product = piece_product(line, first, columns);
    add_up(r, line, first + thread < pieces ? product : 0, first == 0);
  }
}

// For types with pieces: processes the pieces in turn, with all lines for each. The first lines are already
// requested.
void multiply_pieces() {
  const uint pieces = push.p.in_cols / 32;
  for (uint first = 0; first < pieces; first += kShare) {
    const Columns of_first_row = columns_of(first_row, min(first + thread, pieces - 1));
    [[dont_unroll]] for (uint turn = 0; turn < kLines / kTogether; ++turn) {
      multiply_line(turn, 0, first, of_first_row);
      if (kTogether > 1) multiply_line(turn, 1, first, of_first_row);
      if (kTogether > 2) {
        multiply_line(turn, 2, first, of_first_row);
        multiply_line(turn, 3, first, of_first_row);
      }
    }
  }
}

// For types without pieces: eight threads share 256 columns, with four of each 32.
void multiply_quads() {
  const uint quad = thread % 8, groups = (push.p.in_cols + 31 - 4 * quad) / 32;
  float sums[kRows * kLines];
  [[unroll]] for (uint s = 0; s < kRows * kLines; ++s) sums[s] = 0;
  for (uint group = thread / 8; group < groups; group += kShare / 8) {
    vec4 of_x[kRows];
    [[unroll]] for (uint r = 0; r < kRows; ++r) of_x[r] = x_at(first_row + min(r, rows - 1), 32 * group + 4 * quad);
    [[unroll]] for (uint l = 0; l < kLines; ++l) {
      const vec4 of_w = weights(Row(l % kMatrices, line_start(l), push.p.in_cols), group / 8, group % 8, quad);
      [[unroll]] for (uint r = 0; r < kRows; ++r) sums[r * kLines + l] = add_products(sums[r * kLines + l], of_x[r], of_w);
    }
  }
  [[unroll]] for (uint s = 0; s < kRows * kLines; ++s) add_up(s / kLines, s % kLines, sums[s], true);
}

float team_sum(uint sum, uint team) {
  const uint each = kSubgroups / kTeams;
  float total = 0;
  for (uint i = 0; i < each; ++i) total += subgroup_sums[sum * kSubgroups + team * each + i];
  return total;
}
float group_sum(uint sum) { return team_sum(sum, 0); }

// Stores a column of y for its norm, and then the sums of the workgroup's squares.
void prepare(uint col, float stored) {
  squares_of_cols[col] = stored * stored;
  norm[push.base[kPrepared] + first_col + col] = stored * norm_weight[push.base[kNormWeight] + first_col + col];
}
void leave_squares() {
  barrier();
  [[dont_unroll]] for (uint i = place; i < kCols / kSquaresEach && first_col + kSquaresEach * i < push.p.out_cols; i += kThreads) {
    float sum = 0;
    [[unroll]] for (uint j = 0; j < kSquaresEach; ++j) sum += squares_of_cols[kSquaresEach * i + j];
    squares_of_y[push.base[kSquares] + first_col / kSquaresEach + i] = sum;
  }
}

#ifdef EXPERTS
#include "find_expert.glsl"
#include "route.glsl"
float logit(uint expert) { return logits[push.base[9] + expert]; }
float route_bias(uint expert) { return route_biases[push.base[10] + expert]; }
float route_each(uint expert) { return 1; }
RouteParams route_params() {
  return RouteParams(kExperts, kRouted, push.p.route_kind, push.p.route_share, push.p.route_scale, kGroups, kGroupsUsed);
}

// Chooses the experts; one subgroup stores the choice.
void choose_expert(uint slot) {
  const bool leaves = gl_WorkGroupID.x == 0 && gl_WorkGroupID.y == 0 && gl_SubgroupID == 0;
  route_row(leaves);
  expert = chosen_expert(slot);
  if (!leaves) return;
  weigh_chosen();
  uint place = chosen_before();
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    if (expert_of(i) < kExperts) first_made[push.base[5] + expert_of(i)] = place;
    if (!chosen[i]) continue;
    weight_made[push.base[8] + place] = shares[i];
    row_made[push.base[6] + place] = 0;
    ++place;
  }
  if (gl_SubgroupInvocationID == 0) first_made[push.base[5] + kExperts] = kRouted;
}

void multiply_slot(uint slot) {
  first_row = push.p.of_tokens != 0 ? 0 : slot;  // with one token, x has one row
  if (kInPieces) [[unroll]] for (uint l = 0; l < kTogether; ++l) fetch(l, 0, l);
  if (kInPieces)
    multiply_pieces();
  else
    multiply_quads();
  barrier();
}

// Computes the columns of a slot.
void make_slot(uint slot) {
  if (kRouted > 0)
    choose_expert(slot);
  else
    find_expert(slot);
  if (!sees_expert()) return;
  multiply_slot(slot);
  [[dont_unroll]] for (uint col = place; col < min(kCols, push.p.out_cols - first_col); col += kThreads) {
    if (kMatrices == 2)
      store_glu(slot, first_col + col, group_sum(2 * col), group_sum(2 * col + 1));
    else
      store(slot, first_col + col, group_sum(col));
  }
}

// Computes the columns of the sum over all slots; experts that the dispatch does not see are skipped.
shared uint experts_of_teams[kTeams];
shared float weights_of_teams[kTeams];
void add_slots() {
  for (uint first = 0; first < kChosen; first += kTeams) {
    const uint team = place / kShare, slot = min(first + team, kChosen - 1);
    const float weight = weight_of_slot[push.base[8] + slot];
    find_expert(slot);
    if (thread == 0) {
      experts_of_teams[team] = expert;
      weights_of_teams[team] = weight;
    }
    if (!sees_expert()) expert = push.p.first_expert;
    multiply_slot(slot);
    [[dont_unroll]] for (uint col = place; col < kCols; col += kThreads) {
      if (kPrepares) squares_of_cols[col] = 0;
      if (first_col + col >= push.p.out_cols) continue;
      const uint at = push.base[3] + first_col + col;
      float sum = y[at];
      [[unroll]] for (uint t = 0; t < kTeams; ++t) {
        expert = experts_of_teams[t];
        const float product = weights_of_teams[t] * with_bias(first_col + col, team_sum(col, t));
        if (first + t < kChosen && sees_expert()) sum += product;
      }
      y[at] = sum;
      if (kPrepares) prepare(col, sum);  // the last dispatch's values stay
    }
    barrier();
  }
  if (kPrepares) leave_squares();
}

void main() {
  first_col = gl_WorkGroupID.x * kCols;
  rows = 1;
  find_place();
  if (kChosen == 0)
    make_slot(gl_WorkGroupID.y);
  else
    add_slots();
}
#else
// The thread's part of the sum of squares of x. Loops are not unrolled, because most code that runs once must
// first be loaded.
float own_squares() {
  const uint sums = (push.p.in_cols + kSquaresEach - 1) / kSquaresEach;
  float squares = 0;
  [[dont_unroll]] for (uint i = thread; 4 * i < sums; i += kThreads) {
    const vec4 four = squares_of_x[push.base[5] / 4 + i];
    [[unroll]] for (uint k = 0; k < 4; ++k) squares += 4 * i + k < sums ? four[k] : 0;
  }
  return squares;
}
// The missing scale of a prepared norm. All threads call this.
float norm_scale(float squares) {
  squares = sum_of_lanes(squares);
  if (gl_SubgroupInvocationID == 0) subgroup_squares[gl_SubgroupID] = squares;
  barrier();
  float sum = 0;
  for (uint i = 0; i < kSubgroups; ++i) sum += subgroup_squares[i];
  return inversesqrt(sum / float(push.p.in_cols) + push.p.eps);
}

void main() {
  first_col = gl_WorkGroupID.x * kCols;
  first_row = gl_WorkGroupID.y * kRows;
  const uint all_rows = product_rows();
  if (first_row >= all_rows) return;
  rows = min(all_rows - first_row, kRows);

  find_place();

  if (kInPieces) [[unroll]] for (uint l = 0; l < kTogether; ++l) fetch(l, 0, l);
  const float squares = push.p.scales != 0 ? own_squares() : 0;
  if (kInPieces)
    multiply_pieces();
  else
    multiply_quads();
  float scale = 1;
  if (push.p.scales != 0)
    scale = norm_scale(squares);
  else
    barrier();
  [[dont_unroll]] for (uint i = thread; i < rows * kCols; i += kThreads) {
    const uint row = i / kCols, col = i % kCols;
    if (push.p.prepares != 0) squares_of_cols[col] = 0;
    if (first_col + col >= push.p.out_cols) continue;
    const float sum = scale * group_sum(i * kMatrices);
    if (kMatrices == 2) {
      store_glu(first_row + row, first_col + col, sum, scale * group_sum(i * kMatrices + 1));
      continue;
    }
    const float stored = store(first_row + row, first_col + col, sum);
    if (push.p.prepares == 0) continue;
    prepare(col, stored);
  }
  if (push.p.prepares != 0) leave_squares();
  if (push.p.writes_norm != 0 && first_col == 0)
    [[dont_unroll]] for (uint i = thread; i < push.p.in_cols; i += kThreads) norm[push.base[6] + i] = x[push.base[0] + i] * scale;
}
#endif
