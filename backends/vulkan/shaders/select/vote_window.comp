// vote, its max-pool of `window` over the candidates with stride 1. The candidates of a group are those of
// the middle; the candidates of a layer are the positions that have a vote, in order.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kHasGate = false;
layout(constant_id = 1) const bool kLayer = false;  // VoteParams::scope

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
  const uint head = gl_WorkGroupID.y;  // 0 for a layer
  const uint all = units(step_entries(step, head_states[push.p.head_state + head]), push.p.page);
  if (!selects(step, all) || (kHasGate && gate[push.base[3]] != 0)) return;
  const uint n = kLayer ? counts[push.base[2] + push.tiles] : middle_end(step, all) - step.n_init;
  const uint start = kLayer ? 0 : head * push.p.vote_capacity + step.n_init;
  // The window has (window - 1) / 2 candidates before the current one. An even window has one output fewer,
  // so the last candidate gets -inf and is never picked.
  const uint before = (push.p.window - 1) / 2, behind = push.p.window - before, outputs = n - (push.p.window + 1) % 2;
  for (uint i = gl_GlobalInvocationID.x; i < n; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
    float top = uintBitsToFloat(0xff800000);
    if (i < outputs)
      for (uint j = i - min(i, before); j < i + min(n - i, behind); ++j)
        top = max(top, packed_votes[push.base[0] + start + j]);
    votes[push.base[4] + (kLayer ? places[push.base[1] + i] : start + i)] = top;
  }
}
