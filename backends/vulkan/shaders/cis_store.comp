// cis_store: the retention scores of the step's rows, written once and never changed.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "step.glsl"

layout(local_size_x = 64) in;

layout(set = 0, binding = 1, std430) readonly buffer Score { float score[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Cis { float cis[]; };
layout(push_constant) uniform Push {
  CisStoreParams p;
  uint base[2];
} push;

// A permutation of the 32-bit numbers in which every input bit changes every output bit about half of the time.
uint mix_bits(uint x) {
  x += 0x9e3779b9;
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  return x ^ x >> 16;
}

// Uniform in [0, 1), a multiple of 2^-24. Every backend computes these bits.
float hash_score(uint head, uint position) {
  const uint bits = mix_bits(mix_bits(mix_bits(mix_bits(step.seed) ^ push.p.layer) ^ head) ^ position);
  return float(bits >> 8) * (1.0 / 16777216);
}

void main() {
  const uint row = gl_GlobalInvocationID.x, head = push.p.first_head + gl_WorkGroupID.y;
  if (row >= step.n_rows) return;
  const int position = step.position + int(row);
  float value;
  if (push.p.kind == kCisPosition) {
    value = float(position);
  } else if (push.p.kind == kCisHash) {
    value = hash_score(push.p.share_heads != 0 ? 0 : head, uint(position));
  } else {
    const uint columns = push.p.first_head + push.p.heads, own = push.base[0] + row * columns;
    value = score[own + (push.p.share_heads != 0 ? 0 : head)];
    if (push.p.share_heads != 0)
      for (uint other = 1; other < columns; ++other)
        if (value < score[own + other]) value = score[own + other];
  }
  const uint first = push.p.into == kIntoPool   ? step.n_entries
                     : push.p.into == kIntoRing ? step.n_entries - step.n_rows
                                                : 0;
  cis[push.base[1] + head * push.p.capacity + first + row] = value;
}
