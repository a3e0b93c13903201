// vote of a layer, where top_k lists its votes next: where entries are positions, their keys are counted, so that those that list
// know about where the smallest is that is picked.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../../select/top_k.h"
#include "../../../order_bits.h"
#include "../step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 256;
layout(constant_id = 1) const bool kHasGate = false;
layout(constant_id = 2) const uint kSlices = 1;  // of the layer's query heads, each a thread's of an entry

// For top_k_layer.comp: how many keys each bin has, zeros before, and whether they are counted.
layout(set = 0, binding = 6, std430) buffer Counts { uint counts[]; };
layout(push_constant) uniform Push {
  VoteParams p;
  uint base[6];
} push;

const uint kTile = kThreads, kEntries = kThreads / kSlices;
layout(set = 0, binding = 2, std430) readonly buffer Lse { float lse[]; };
#include "vote.glsl"

shared float lses[kMostLayerQueries];
shared vec2 of_slices[kThreads];  // LogSum

// What the query heads [begin, end) say about an entry; sixteen are read at once.
LogSum said_about(uint entry, uint begin, uint end) {
  LogSum vote = kNoSum;
  [[dont_unroll]] for (uint first = begin; first < end; first += 16) {
    vec4 said[4];
    [[unroll]] for (uint i = 0; i < 16; ++i) {
      const uint query = min(first + i, end - 1);
      said[i / 4][i % 4] = scores[push.base[0] + query * push.p.score_capacity + entry] - lses[query];
    }
    [[unroll]] for (uint i = 0; i < 4; ++i)
      if (first + 4 * i < end) vote = added(vote, said[i], end - first - 4 * i);
  }
  return vote;
}

void main() {
  const bool hit = kHasGate && gate[push.base[3]] != 0;  // read at once with the step
  const uint n = entries_of_layer(), thread = gl_LocalInvocationIndex;
  if (!selects(step, n) || hit) return;
  const uint end = middle_end(step, n), positions = uint(step.position) + step.n_rows;
  const uint queries = push.p.heads * push.p.group, each = (queries + kSlices - 1) / kSlices;
  for (uint query = thread; query < queries; query += kThreads) lses[query] = lse[push.base[1] + query];
  if (!are_entries_positions(end)) {
    for (uint first = gl_WorkGroupID.x * kTile; first < positions; first += gl_NumWorkGroups.x * kTile) {
      const uint bits = layer_vote(first);
      if (first + thread < positions) votes[push.base[4] + first + thread] = bits;
    }
    return;
  }
  barrier();

  if (gl_WorkGroupID.x == 0 && thread == 0) counts[push.base[5] + kLayerBins] = 1;
  const uint slice = thread / kEntries;
  for (uint first = gl_WorkGroupID.x * kEntries; first < positions; first += gl_NumWorkGroups.x * kEntries) {
    const uint entry = first + thread % kEntries;
    const bool competes = entry >= step.n_init && entry < end;
    LogSum vote = kNoSum;
    if (competes) vote = said_about(entry, slice * each, min((slice + 1) * each, queries));
    of_slices[thread] = vec2(vote.peak, vote.sum);
    barrier();
    [[unroll]] for (uint i = 1; i < kSlices; ++i) {
      const vec2 other = of_slices[thread % kEntries + i * kEntries];
      vote = added(vote, LogSum(other.x, other.y));
    }
    barrier();
    if (slice > 0 || entry >= positions) continue;
    const uint bits = log_sum_bits(vote), key = order_bits(bits);
    votes[push.base[4] + entry] = bits;
    const uint bin = key < kLayerLow ? 0 : min((key - kLayerLow) >> kLayerShift, kLayerBins - 1);
    if (competes) atomicAdd(counts[push.base[5] + bin], 1);
  }
}
