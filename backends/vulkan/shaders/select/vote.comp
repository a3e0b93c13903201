// vote: combines the heads' scores into one vote per entry or page (group) or per position (layer), in the
// log domain.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

const uint kTile = 128;  // votes per workgroup
layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kHasGate = false;
layout(constant_id = 1) const bool kCounts = false;  // for a max-pool over a layer's votes
layout(constant_id = 2) const bool kLayer = false;   // VoteParams::scope

// Number of votes in each tile of positions
layout(set = 0, binding = 6, std430) writeonly buffer Counts { uint counts[]; };
layout(push_constant) uniform Push {
  VoteParams p;
  uint base[6];
} push;

layout(set = 0, binding = 2, std430) readonly buffer Lse { float lse[]; };
#include "vote.glsl"

void group_votes(uint head, uint n) {
  for (uint first = gl_WorkGroupID.x * kTile; first < n; first += gl_NumWorkGroups.x * kTile) {
    const uint unit = first + gl_LocalInvocationIndex;
    if (unit >= n) continue;
    LogSum vote = kNoSum;
    if (unit >= step.n_init && unit < middle_end(step, n)) add_group(head, unit, vote);
    votes[push.base[4] + head * push.p.vote_capacity + unit] = log_sum_bits(vote);
  }
}

shared uint tile_count;

void layer_votes() {
  const uint positions = uint(step.position) + step.n_rows, thread = gl_LocalInvocationIndex;
  for (uint first = gl_WorkGroupID.x * kTile; first < positions; first += gl_NumWorkGroups.x * kTile) {
    const uint bits = layer_vote(first);
    if (first + thread < positions) votes[push.base[4] + first + thread] = bits;
    if (!kCounts) continue;
    if (thread == 0) tile_count = 0;
    barrier();
    if (bits != kMinusInfinity) atomicAdd(tile_count, 1);
    barrier();
    if (thread == 0) counts[push.base[5] + first / kTile] = tile_count;
  }
}

void main() {
  const uint head = gl_WorkGroupID.y;  // 0 for a layer
  const uint n = units(step_entries(step, head_states[push.p.head_state + head]), push.p.page);
  if (!selects(step, n) || (kHasGate && gate[push.base[3]] != 0)) return;
  if (kLayer)
    layer_votes();
  else
    group_votes(head, n);
}
