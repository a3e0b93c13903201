// given_score: stores retention scores of all entries that the host computed.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const bool kHasChunk = false;

layout(set = 0, binding = 1, std430) readonly buffer Score { float score[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Cis { float cis[]; };
layout(set = 0, binding = 3, std430) writeonly buffer ChunkCis { float chunk_cis[]; };
layout(push_constant) uniform Push {
  GivenScoreParams p;
  uint base[3];
} push;

void main() {
  const uint head = push.p.first_head + gl_WorkGroupID.y;
  const HeadState own = head_states[push.p.head_state + head];
  const uint n = step_entries(step, own), threads = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
  for (uint i = gl_GlobalInvocationID.x; i < n; i += threads) {
    const float given = score[push.base[0] + i];
    if (i < own.n_entries || !kHasChunk)
      cis[push.base[1] + own.first + i] = given;
    else
      chunk_cis[push.base[2] + head * push.p.chunk_capacity + i - own.n_entries] = given;
  }
}
