// How the results of a product are stored: y[r][c] = or += scale * sum over i of x[r][i] w[c][i] + bias[c], or
// y = act(y) * that. The operands of these shaders are x, w, bias, y and others up to kOperands, the last of
// which is the code books (BOOKS).
#include "../step.glsl"
#include "activate.glsl"
#include "dense_params.h"

// y = act(y) * product: the second product of a glu. Shaders that compute both at once activate the first
// themselves.
layout(constant_id = 1) const bool kActivates = false;

layout(set = 0, binding = 3, std430) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 4, std430) buffer Y { float y[]; };
layout(push_constant) uniform Push {
  ProductParams p;
  uint base[kOperands];
} push;

// Rows that this dispatch computes.
uint product_rows() {
  const uint rows = row_count(push.p.rows);
  return rows - min(rows, push.p.first_row);
}

// The row of W for a column of y, and the number of rows.
uint matrix_row(uint column) { return column; }
uint matrix_rows() { return push.p.out_cols; }

uint y_at(uint row, uint column) { return push.base[3] + row * push.p.y_stride + column; }

// Stores a result in y and returns the new value.
float store(uint row, uint column, float sum) {
  const uint at = y_at(row, column);
  sum *= push.p.w_scale;
  if (push.p.has_bias != 0) sum += bias[push.base[2] + column];
  if (kActivates)
    sum *= activate(y[at], push.p.act);
  else if (push.p.adds != 0)
    sum += y[at];
  y[at] = sum;
  return sum;
}
// Stores a result of both products of a glu in y.
void store_glu(uint row, uint column, float gate, float up) {
  y[y_at(row, column)] = activate(gate * push.p.w_scale, push.p.act) * (up * push.p.up_scale);
}
