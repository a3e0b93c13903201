// vote of a layer, if top_k lists the votes next. If entries are positions, the votes are also counted, so
// that the listing workgroups know the approximate position of the smallest picked vote.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../../select/top_k.h"
#include "../step.glsl"
#include "layer_bins.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 256;
layout(constant_id = 1) const bool kHasGate = false;
// Slices of the layer's query heads; a thread handles one slice for an entry
layout(constant_id = 2) const uint kSlices = 1;

// For top_k_layer.comp: the number of votes in each bin, zeros before; whether they are counted; and
// most_of_kth().
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

// Loads the scores of sixteen query heads from `first` on for an entry; heads from `end` on repeat the last
// one.
vec4 said[4];
void ask(uint entry, uint first, uint end) {
  [[unroll]] for (uint i = 0; i < 16; ++i)
    said[i / 4][i % 4] = scores[push.base[0] + min(first + i, end - 1) * push.p.score_capacity + entry];
}
// The vote of query heads [begin, end); ask() has loaded the first of them.
LogSum said_about(uint entry, uint begin, uint end) {
  LogSum vote = kNoSum;
  [[dont_unroll]] for (uint first = begin; first < end; first += 16) {
    if (first > begin) ask(entry, first, end);
    [[unroll]] for (uint i = 0; i < 16; ++i) said[i / 4][i % 4] -= lses[min(first + i, end - 1)];
    [[unroll]] for (uint i = 0; i < 4; ++i)
      if (first + 4 * i < end) vote = added(vote, said[i], end - first - 4 * i);
  }
  return vote;
}

void main() {
  const uint thread = gl_LocalInvocationIndex, slice = thread / kEntries;
  const uint queries = push.p.heads * push.p.group, each = (queries + kSlices - 1) / kSlices;
  const uint begin_query = slice * each, end_query = min(begin_query + each, queries);
  // Issued before the step is known, which is still being loaded.
  ask(min(gl_WorkGroupID.x * kEntries + thread % kEntries, push.p.score_capacity - 1), begin_query, end_query);
  const bool hit = kHasGate && gate[push.base[3]] != 0;
  const uint n = entries_of_layer();
  if (!selects(step, n) || hit) return;
  const uint end = middle_end(step, n), positions = uint(step.position) + step.n_rows;
  for (uint query = thread; query < queries; query += kThreads) lses[query] = lse[push.base[1] + query];
  if (!are_entries_positions(end)) {
    for (uint first = gl_WorkGroupID.x * kTile; first < positions; first += gl_NumWorkGroups.x * kTile) {
      const uint bits = layer_vote(first);
      if (first + thread < positions) votes[push.base[4] + first + thread] = bits;
    }
    return;
  }
  barrier();

  const float most = most_of_kth(queries, step.select_k);
  if (gl_WorkGroupID.x == 0 && thread == 0) {
    counts[push.base[5] + kLayerCounted] = 1;
    counts[push.base[5] + kLayerMost] = floatBitsToUint(most);
  }
  for (uint first = gl_WorkGroupID.x * kEntries; first < positions; first += gl_NumWorkGroups.x * kEntries) {
    const uint entry = first + thread % kEntries;
    const bool competes = entry >= step.n_init && entry < end;
    LogSum vote = kNoSum;
    if (competes) {
      if (first > gl_WorkGroupID.x * kEntries) ask(entry, begin_query, end_query);
      vote = said_about(entry, begin_query, end_query);
    }
    of_slices[thread] = vec2(vote.peak, vote.sum);
    barrier();
    [[unroll]] for (uint i = 1; i < kSlices; ++i) {
      const vec2 other = of_slices[thread % kEntries + i * kEntries];
      vote = added(vote, LogSum(other.x, other.y));
    }
    barrier();
    if (slice > 0 || entry >= positions) continue;
    const uint bits = log_sum_bits(vote);
    votes[push.base[4] + entry] = bits;
    if (competes) atomicAdd(counts[push.base[5] + count_at(layer_bin(bits_below(most, bits)))], 1);
  }
}
