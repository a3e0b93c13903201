// delta_net, row by row: a workgroup takes kColumns columns of a value head's matrix. A thread keeps kEach
// elements of a column in registers, so that a step reads and writes the matrix once. With p = M^T k and
// r = M^T q of the matrix before a row,
//   delta = beta (v - decay p);  y = decay r + (k q) delta;  M = decay M + k delta^T.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "../step.glsl"
#include "gates.glsl"

layout(local_size_x_id = 0) in;
const uint kThreads = gl_WorkGroupSize.x;
layout(constant_id = 1) const uint kWidth = 128;  // a multiple of kColumns
const uint kColumns = 32;
const uint kParts = kThreads / kColumns;  // of a column; a divisor of kColumns
const uint kEach = kWidth / kParts;

layout(set = 0, binding = 1, std430) readonly buffer Qkv { float qkv[]; };
layout(set = 0, binding = 2, std430) readonly buffer Gates { float gates[]; };
layout(set = 0, binding = 3, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = 4, std430) readonly buffer Dt { float dt[]; };
layout(set = 0, binding = 5, std430) buffer Slots { float slots[]; };
layout(set = 0, binding = 6, std430) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
  DeltaNetParams p;
  uint slot_stride;
  uint base[6];
} push;

shared float keys[2 * kWidth], queries[2 * kWidth];  // of a row and of the next one
shared float p_parts[kThreads], r_parts[kThreads];
shared float kk_parts[kParts], qq_parts[kParts], kq_parts[kParts];

void main() {
  const DeltaNetParams p = push.p;
  const uint thread = gl_LocalInvocationIndex, head = gl_WorkGroupID.y;
  const uint part = thread / kColumns, column = gl_WorkGroupID.x * kColumns + thread % kColumns;
  const uint key_head = p.tiled == 1 ? head % p.key_heads : head / (p.value_heads / p.key_heads);
  const uint in_slot = push.base[4] + (head * kWidth + part * kEach) * kWidth + column;

  float m[kEach];
  if (step.state_from == kNoState) {
    [[unroll]] for (uint i = 0; i < kEach; ++i) m[i] = 0;
  } else {
    const uint from = in_slot + step.state_from * push.slot_stride;
    [[unroll]] for (uint i = 0; i < kEach; ++i) m[i] = slots[from + i * kWidth];
  }
  const float of_a = a[push.base[2] + head], of_dt = dt[push.base[3] + head];
  for (uint row = 0; row < step.n_rows; ++row) {
    const uint of_row = push.base[0] + row * p.qkv_stride, of_gates = push.base[1] + row * p.gates_stride + head;
    const uint here = row % 2 * kWidth;
    for (uint i = thread; i < kWidth; i += kThreads) {
      keys[here + i] = qkv[of_row + p.k_column + key_head * kWidth + i];
      queries[here + i] = qkv[of_row + p.q_column + key_head * kWidth + i];
    }
    const float v = qkv[of_row + p.v_column + head * kWidth + column];
    const float gamma = of_a * softplus(gates[of_gates + p.alpha_column] + of_dt);
    const float decay = keep_nan(gamma, exp_ulp(gamma)), beta = sigmoid(gates[of_gates + p.beta_column]);
    barrier();

    float of_p = 0, of_r = 0, kk = 0, qq = 0, kq = 0;
    [[unroll]] for (uint i = 0; i < kEach; ++i) {
      const float k = keys[here + part * kEach + i], q = queries[here + part * kEach + i];
      of_p += k * m[i];
      of_r += q * m[i];
      kk += k * k;
      qq += q * q;
      kq += k * q;
    }
    p_parts[thread] = of_p;
    r_parts[thread] = of_r;
    if (thread % kColumns == 0) kk_parts[part] = kk, qq_parts[part] = qq, kq_parts[part] = kq;
    barrier();

    of_p = of_r = kk = qq = kq = 0;
    [[unroll]] for (uint i = 0; i < kParts; ++i) {
      of_p += p_parts[i * kColumns + thread % kColumns];
      of_r += r_parts[i * kColumns + thread % kColumns];
      kk += kk_parts[i];
      qq += qq_parts[i];
      kq += kq_parts[i];
    }
    const float k_scale = inversesqrt(kk + p.eps), q_scale = inversesqrt(qq + p.eps) * inversesqrt(float(kWidth));
    const float delta = beta * (v - decay * k_scale * of_p);
    [[unroll]] for (uint i = 0; i < kEach; ++i) m[i] = decay * m[i] + keys[here + part * kEach + i] * (k_scale * delta);
    if (part == 0)
      y[push.base[5] + row * p.y_stride + head * kWidth + column] = q_scale * (decay * of_r + k_scale * kq * delta);
  }
  const uint to = in_slot + step.state_to * push.slot_stride;
  [[unroll]] for (uint i = 0; i < kEach; ++i) slots[to + i * kWidth] = m[i];
}
