// ssm, before the state: a workgroup takes a chunk and some heads of a group, which share the products of its
// rows of B and C.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "../step.glsl"
#include "gates.glsl"
#include "ssm_chunk.glsl"

layout(set = 0, binding = 2, std430) readonly buffer Dt { float dt[]; };
layout(set = 0, binding = 3, std430) readonly buffer Bias { float dt_bias[]; };
layout(set = 0, binding = 4, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Prepared { float prepared[]; };
layout(push_constant) uniform Push {
  SsmParams p;
  uint first;  // row
  uint base[5];
} push;

const uint kHeads = 8;  // of a workgroup
shared float products[kChunk * (kChunk + 1)];  // c_i b_j
shared float deltas[kHeads * kChunk], gammas[kHeads * kChunk];

void main() {
  const SsmParams p = push.p;
  const uint thread = gl_LocalInvocationIndex, of_group = p.heads / p.groups, group = gl_WorkGroupID.y;
  const uint first_head = group * of_group + gl_WorkGroupID.z * kHeads;
  const uint heads = min(kHeads, (group + 1) * of_group - first_head);
  const uint first = push.first + gl_WorkGroupID.x * kChunk;
  if (first >= step.n_rows) return;
  const uint rows = min(step.n_rows - first, kChunk);
  const uint row_at = push.base[0] + first * p.xbc_stride + group * kState;

  // Rows after the last leave the state as it is.
  for (uint i = thread; i < heads * kChunk; i += kThreads) {
    const uint head = first_head + i / kChunk, row = i % kChunk;
    float delta = 0, gamma = 0;
    if (row < rows) {
      delta = softplus(dt[push.base[1] + (first + row) * p.dt_stride + p.dt_column + head] + dt_bias[push.base[2] + head]);
      gamma = delta * a[push.base[3] + head];
    }
    deltas[i] = delta;
    gammas[i] = gamma;
  }
  // Four threads share a row of C, with every fourth row of B.
  for (uint row = thread / 4; row < rows; row += kThreads / 4) {
    float sums[kChunk / 4];
    [[unroll]] for (uint k = 0; k < kChunk / 4; ++k) sums[k] = 0;
    for (uint n = 0; n < kState; n += 4) {
      const vec4 c = read_quad(row_at + row * p.xbc_stride + p.c_column + n);
      [[unroll]] for (uint k = 0; k < kChunk / 4; ++k) {
        const uint other = min(thread % 4 + 4 * k, row);
        sums[k] += dot(c, read_quad(row_at + other * p.xbc_stride + p.b_column + n));
      }
    }
    [[unroll]] for (uint k = 0; k < kChunk / 4; ++k) products[row * (kChunk + 1) + thread % 4 + 4 * k] = sums[k];
  }
  barrier();

  // G_i - G_j is the sum between the rows, which is more exact than a difference of two sums.
  for (uint i = thread; i < heads * kChunk; i += kThreads) {
    const uint in_heads = i / kChunk * kChunk, column = i % kChunk;
    const uint of = push.base[4] + (gl_WorkGroupID.x * p.heads + first_head + i / kChunk) * kPrepared;
    float before = 0;
    for (uint row = 0; row <= column; ++row) before += gammas[in_heads + row];
    prepared[of + kScales + column] = keep_nan(before, exp_ulp(before));
    const float delta = deltas[i];
    float gamma = 0;
    for (uint row = column; row < kChunk; ++row) {
      if (row > column) gamma += gammas[in_heads + row];
      if (row < rows) prepared[of + kPairs + row * kChunk + column] = keep_nan(gamma, exp_ulp(gamma)) * delta * products[row * (kChunk + 1) + column];
    }
    prepared[of + kNewScales + column] = keep_nan(gamma, exp_ulp(gamma)) * delta;
  }
}
