// Products of experts: y[slot][c] = sum over i of x[i] w[c][i] + bias[c], where x is the row of the slot or
// of its token, and w and bias are those of its expert; or y = act(y) * that, or act(w x + bias) * (up x +
// up_bias), or relu_sqr(w x + bias). Instead of a bias, an expert may have a factor of its product. Has the
// interface of product.glsl, for the same shaders.
#include "../step.glsl"
#include "activate.glsl"
#include "dense_params.h"

layout(constant_id = 1) const bool kActivates = false;  // y = act(y) * product: the second product of a glu

// [experts][bias_rows], or factors [experts]; as up_bias
layout(set = 0, binding = 3, std430) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 4, std430) buffer Y { float y[]; };
layout(set = 0, binding = 6, std430) readonly buffer First { uint first_slots[]; };
layout(set = 0, binding = 7, std430) readonly buffer RowOfSlot { uint row_of_slot[]; };
layout(set = 0, binding = 8, std430) readonly buffer UpBias { float up_bias[]; };
layout(push_constant) uniform Push {
  ExpertProductParams p;
  uint base[kOperands];
} push;

uint expert;  // the expert of the workgroup

// The first slot of an expert; for the index after the last expert, the end of all slots.
uint first_slot(uint of_expert) { return first_slots[push.base[5] + of_expert]; }
// Whether the expert's matrix is visible to the dispatch.
bool sees_expert() { return expert - push.p.first_expert < push.p.seen_experts; }
// The visible row of the matrices for a column of y, and the number of rows.
uint matrix_row(uint column) { return (expert - push.p.first_expert) * push.p.matrix_rows + column; }
uint matrix_rows() { return (push.p.seen_experts - 1) * push.p.matrix_rows + push.p.out_cols; }
uint x_row(uint slot) { return push.p.of_tokens != 0 ? row_of_slot[push.base[6] + slot] : slot - push.p.first_slot; }

// act(gate) * up. kActClamped: gpt-oss.
float glu_of(float gate, float up) {
  if (push.p.act != kActClamped) return activate(gate, push.p.act) * up;
  gate = min(gate, 7);
  return gate / (1 + exp_ulp(-1.702 * gate)) * (clamp(up, -7, 7) + 1);
}
uint y_at(uint slot, uint column) { return push.base[3] + (slot - push.p.first_slot) * push.p.y_stride + column; }
uint bias_at(uint column) { return expert * push.p.bias_rows + column; }
float with_bias(uint column, float sum) {
  if (push.p.has_bias == kHasScale) return sum * bias[push.base[2] + expert];
  return push.p.has_bias != 0 ? sum + bias[push.base[2] + bias_at(column)] : sum;
}
float with_up_bias(uint column, float sum) {
  if (push.p.has_up_bias == kHasScale) return sum * up_bias[push.base[7] + expert];
  return push.p.has_up_bias != 0 ? sum + up_bias[push.base[7] + bias_at(column)] : sum;
}
void store(uint slot, uint column, float sum) {
  const uint at = y_at(slot, column);
  sum = with_bias(column, sum);
  if (push.p.act == kActReluSqr) sum = relu_sqr(sum);  // a glu without a gate
  y[at] = kActivates ? glu_of(y[at], sum) : sum;
}
void store_glu(uint slot, uint column, float gate, float up) {
  y[y_at(slot, column)] = glu_of(with_bias(column, gate), with_up_bias(column, up));
}
