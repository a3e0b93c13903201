// short_conv: a causal convolution of each channel. A thread computes kRows rows of a channel, and reads each u once. The
// threads of the first rows also write the tail. They alone read it, so both may be the same memory.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"
#include "gates.glsl"

const uint kRows = 8;  // at least kMostTaps - 1: later rows do not reach the tail
layout(local_size_x = 64) in;
layout(constant_id = 0) const uint kTaps = 3;
layout(constant_id = 1) const bool kHasTimes = false;
layout(constant_id = 2) const bool kHasGate = false;
layout(constant_id = 3) const bool kHasBias = false;
layout(constant_id = 4) const bool kSilu = false;

layout(set = 0, binding = 1, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = 2, std430) readonly buffer W { float w[]; };
layout(set = 0, binding = 3, std430) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 4, std430) buffer Slots { float slots[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
  ShortConvParams p;
  uint slot_stride;
  uint base[5];
} push;

const uint kTailRows = kTaps - 1;

uint in_tail(uint slot, uint row, uint channel) {
  return push.base[3] + slot * push.slot_stride + row * push.p.channels + channel;
}

// u of row `row` - kTailRows of the step; the first ones are those of the tail.
float read_u(uint row, uint channel) {
  if (row < kTailRows) return step.state_from == kNoState ? 0 : slots[in_tail(step.state_from, row, channel)];
  const uint at = push.base[0] + (row - kTailRows) * push.p.x_stride + channel;
  return kHasTimes ? x[at + push.p.x_column] * x[at + push.p.times_column] : x[at + push.p.x_column];
}

void main() {
  const uint channel = gl_GlobalInvocationID.x, first = gl_WorkGroupID.y * kRows;
  if (channel >= push.p.channels) return;
  const uint rows = min(step.n_rows - min(first, step.n_rows), kRows);
  if (rows > 0) {
    float weights[kMostTaps], u[kRows + kMostTaps - 1], gates[kRows];
    [[unroll]] for (uint j = 0; j < kTaps; ++j) weights[j] = w[push.base[1] + channel * kTaps + j];
    [[unroll]] for (uint i = 0; i < kRows + kTailRows; ++i)
      if (i < rows + kTailRows) u[i] = read_u(first + i, channel);
    [[unroll]] for (uint i = 0; i < kRows; ++i)
      if (kHasGate && i < rows)
        gates[i] = x[push.base[0] + (first + i) * push.p.x_stride + push.p.gate_column + channel];
    const float start = kHasBias ? bias[push.base[2] + channel] : 0;
    [[unroll]] for (uint i = 0; i < kRows; ++i) {
      if (i >= rows) break;
      float sum = start;
      [[unroll]] for (uint j = 0; j < kTaps; ++j) sum += weights[j] * u[i + j];
      if (kSilu) sum = silu(sum);
      y[push.base[4] + (first + i) * push.p.y_stride + channel] = kHasGate ? gates[i] * sum : sum;
    }
  }
  if (first > 0) return;
  // In ascending order, since a row may become an earlier row of the same memory
  for (uint i = 0; i < kTailRows; ++i)
    slots[in_tail(step.state_to, i, channel)] = read_u(step.n_rows + i, channel);
}
