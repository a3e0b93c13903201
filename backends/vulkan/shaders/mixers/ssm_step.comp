// ssm, row by row. Columns of a state are independent, so a workgroup takes kCols of them. It holds its part of
// the state in registers while it goes through the rows: a thread has a column of every kParts-th number.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"
#include "gates.glsl"

const uint kCols = 16, kParts = 8;
layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kState = 128;

layout(set = 0, binding = 1, std430) readonly buffer Xbc { float xbc[]; };
layout(set = 0, binding = 2, std430) readonly buffer Dt { float dt[]; };
layout(set = 0, binding = 3, std430) readonly buffer Bias { float dt_bias[]; };
layout(set = 0, binding = 4, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = 5, std430) readonly buffer D { float d[]; };
layout(set = 0, binding = 6, std430) buffer Slots { float slots[]; };
layout(set = 0, binding = 7, std430) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
  SsmParams p;
  uint slot_stride;
  uint base[7];
} push;

shared float b_of_row[2][kState], c_of_row[2][kState];  // [row % 2]
shared float sums[2][kParts][kCols];                     // [row % 2]: each part's sum of y

const uint kMostNumbers = kMostSsmState / kParts;  // of a thread
const uint kNumbers = kState / kParts;

void main() {
  const uint thread = gl_LocalInvocationID.x, part = thread / kCols, head = gl_WorkGroupID.y;
  const uint col = gl_WorkGroupID.x * kCols + thread % kCols;
  const uint group = head / (push.p.heads / push.p.groups);
  const uint in_state = push.base[5] + (head * kState + part) * push.p.width + col;

  float s[kMostNumbers];
  [[unroll]] for (uint i = 0; i < kNumbers; ++i)
    s[i] = step.state_from == kNoState
               ? 0.0
               : slots[in_state + step.state_from * push.slot_stride + i * kParts * push.p.width];
  const float of_a = a[push.base[3] + head], of_d = d[push.base[4] + head];
  const float of_bias = dt_bias[push.base[2] + head];

  for (uint row = 0; row < step.n_rows; ++row) {
    const uint at = push.base[0] + row * push.p.xbc_stride, which = row % 2;
    for (uint i = thread; i < kState; i += kCols * kParts) {
      b_of_row[which][i] = xbc[at + push.p.b_column + group * kState + i];
      c_of_row[which][i] = xbc[at + push.p.c_column + group * kState + i];
    }
    const float x = xbc[at + push.p.x_column + head * push.p.width + col];
    const float delta = softplus(dt[push.base[1] + row * push.p.dt_stride + push.p.dt_column + head] + of_bias);
    const float decay = keep_nan(delta, exp_ulp(delta * of_a)), added = delta * x;
    barrier();
    float sum = 0;
    [[unroll]] for (uint i = 0; i < kNumbers; ++i) {
      const uint n = i * kParts + part;
      s[i] = decay * s[i] + b_of_row[which][n] * added;
      sum += c_of_row[which][n] * s[i];
    }
    sums[which][part][thread % kCols] = sum;
    barrier();
    if (part > 0) continue;
    sum = of_d * x;
    [[unroll]] for (uint i = 0; i < kParts; ++i) sum += sums[which][i][thread];
    y[push.base[6] + row * push.p.y_stride + head * push.p.width + col] = sum;
  }

  [[unroll]] for (uint i = 0; i < kNumbers; ++i)
    slots[in_state + step.state_to * push.slot_stride + i * kParts * push.p.width] = s[i];
}
