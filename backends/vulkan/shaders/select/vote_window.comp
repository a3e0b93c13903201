// vote, its max-pool of `window` over the candidates, stride 1: a group's are the middle entries, a layer's the positions that
// have a vote, in order.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kHasGate = false;

layout(set = 0, binding = 1, std430) readonly buffer Packed { float packed_votes[]; };
layout(set = 0, binding = 2, std430) readonly buffer Places { uint places[]; };
layout(set = 0, binding = 3, std430) readonly buffer Counts { uint counts[]; };
layout(set = 0, binding = 4, std430) readonly buffer Gate { uint gate[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Votes { float votes[]; };
layout(push_constant) uniform Push {
  VoteParams p;
  uint tiles;
  uint base[5];
} push;

void main() {
  if (!selects() || (kHasGate && gate[push.base[3]] != 0)) return;
  const bool group = step.vote_scope == kVoteGroup;
  const uint n = group ? middle_end() - step.n_init : counts[push.base[2] + push.tiles];
  // (window - 1) / 2 before the candidate. An even window has one output fewer, so the last candidate gets -inf and is never
  // picked.
  const uint before = (push.p.window - 1) / 2, behind = push.p.window - before, outputs = n - (push.p.window + 1) % 2;
  for (uint at = gl_GlobalInvocationID.x; at < (group ? push.p.heads * n : n); at += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
    const uint i = at % n, start = group ? at / n * push.p.vote_capacity + step.n_init : 0;
    float top = uintBitsToFloat(0xff800000);
    if (i < outputs)
      for (uint j = i - min(i, before); j < i + min(n - i, behind); ++j)
        top = max(top, packed_votes[push.base[0] + start + j]);
    votes[push.base[4] + (group ? start + i : places[push.base[1] + i])] = top;
  }
}
