// vote: combines the heads' scores into one vote an entry (group) or a position (layer), in the log domain.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

const uint kTile = 128;  // entries or positions of a workgroup
layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kHasGate = false;
layout(constant_id = 1) const bool kCounts = false;  // for a max-pool over a layer's votes

layout(set = 0, binding = 6, std430) writeonly buffer Counts { uint counts[]; };  // of votes in each tile of positions
layout(push_constant) uniform Push {
  VoteParams p;
  uint base[6];
} push;

layout(set = 0, binding = 2, std430) readonly buffer Lse { float lse[]; };
#include "vote.glsl"

void group_votes() {
  const uint n = step_entries(), tiles = (n + kTile - 1) / kTile;
  for (uint item = gl_WorkGroupID.x; item < push.p.heads * tiles; item += gl_NumWorkGroups.x) {
    const uint head = item / tiles, entry = item % tiles * kTile + gl_LocalInvocationIndex;
    if (entry >= n) continue;
    LogSum vote = kNoSum;
    if (entry >= step.n_init && entry < middle_end()) add_group(head, entry, vote);
    votes[push.base[4] + head * push.p.vote_capacity + entry] = log_sum_bits(vote);
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
  if (!selects() || (kHasGate && gate[push.base[3]] != 0)) return;
  if (step.vote_scope == kVoteGroup)
    group_votes();
  else
    layer_votes();
}
