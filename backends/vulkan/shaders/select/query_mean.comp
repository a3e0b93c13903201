// query_score: replaces the scores of all heads by their mean; the last entry is always kept.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = kQueryScoreTile) in;

layout(set = 0, binding = 1, std430) buffer Cis { float cis[]; };
layout(set = 0, binding = 2, std430) buffer ChunkCis { float chunk_cis[]; };
layout(push_constant) uniform Push {
  QueryScoreParams p;
  uint base[2];
} push;

const uint kInfinity = 0x7f800000;

void main() {
  const uint heads = push.p.heads, n = step_entries(step, head_states[push.p.head_state]);
  for (uint entry = gl_GlobalInvocationID.x; entry < n; entry += gl_NumWorkGroups.x * kQueryScoreTile) {
    const uint pooled = head_states[push.p.head_state].n_entries;
    float sum = 0;
    for (uint head = 0; head < heads; ++head)
      sum += entry < pooled ? cis[push.base[0] + head_states[push.p.head_state + head].first + entry]
                            : chunk_cis[push.base[1] + head * push.p.chunk_capacity + entry - pooled];
    const float mean = entry + 1 == n ? uintBitsToFloat(kInfinity) : sum / float(heads * push.p.group);
    for (uint head = 0; head < heads; ++head)
      if (entry < pooled)
        cis[push.base[0] + head_states[push.p.head_state + head].first + entry] = mean;
      else
        chunk_cis[push.base[1] + head * push.p.chunk_capacity + entry - pooled] = mean;
  }
}
