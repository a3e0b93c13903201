// vote, where top_k lists its votes next: as many workgroups a head as will list them also count the keys of a group's votes, and
// the last one finds the bin where the smallest that is picked must be.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../top_k.h"
#include "order.glsl"
#include "step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = kVoteBins;
layout(constant_id = 1) const bool kHasGate = false;
layout(constant_id = 2) const uint kVotes = 4;  // that a thread makes, at most

layout(set = 0, binding = 6, std430) coherent buffer Counts { uint counts[]; };  // [heads][kListParts][kBins]
layout(set = 0, binding = 7, std430) writeonly buffer Spans { uint spans[]; };   // [heads] of top_k.comp's Span
layout(set = 0, binding = 8, std430) coherent buffer Counters { uint counters[]; };
layout(push_constant) uniform Push {
  VoteParams p;
  uint base[8];
} push;

const uint kTile = kThreads, kBins = kVoteBins;
#include "histogram.glsl"
#include "last_group.glsl"
#include "vote.glsl"

void layer_votes() {
  const uint positions = uint(step.position) + step.n_rows, thread = gl_LocalInvocationIndex;
  const uint group = gl_WorkGroupID.y * kListParts + gl_WorkGroupID.x, groups = gl_NumWorkGroups.y * kListParts;
  for (uint first = group * kTile; first < positions; first += groups * kTile) {
    const uint bits = layer_vote(first);
    if (first + thread < positions) votes[push.base[4] + first + thread] = bits;
  }
}

// Where keys are counted: bin b has those from low + (b << shift) on, the first one all below it too, the last one all above.
struct Bins {
  uint low, shift;
};

// Bins between the sample's keys that stand an eighth of it above and below where the smallest that is picked would stand if the
// sample were like all of the `size` votes. Of 16,100 votes 2,048 of which are picked some ten are in a bin then; bins between the
// sample's smallest and largest key had hundreds, and one vote far from the others more.
Bins bins_around_threshold(uint sample_key, uint size) {
  const uvec2 ends = smallest_and_largest(sample_key, sample_key);
  const uint shift = bin_shift(ends.y - ends.x);
  clear_histogram();
  atomicAdd(histogram[(sample_key - ends.x) >> shift], 1);
  barrier();
  const uint kSlack = kThreads / 8, rank = step.select_k * kThreads / size;  // the larger, the smaller the key
  const uint high = find_bin(max(rank, kSlack + 1) - kSlack).bin, low = find_bin(min(rank + kSlack, kThreads)).bin;
  return Bins(ends.x + (low << shift), bin_shift(((high + 1 - low) << shift) - 1));
}

// The span of a bin with keys in it: `wanted` of them are picked.
void store_span(uint at, Bins bins, Bin found) {
  uint low = bins.low + (found.bin << bins.shift), high = low + (1u << bins.shift) - 1;
  if (found.bin == 0) low = 0;
  if (found.bin == kBins - 1) high = 0xffffffff;
  spans[at] = low;
  spans[at + 1] = high - low;
  spans[at + 2] = found.wanted;
  spans[at + 3] = found.count;
}

// A thread's votes, and behind them one of the sample, which is the same in all workgroups of a head.
const uint kEntries = kVotes + 1;
// So many queries are read at once for all of them.
const uint kQueries = 4;

void group_votes() {
  const uint part = gl_WorkGroupID.x, head = gl_WorkGroupID.y, thread = thread_in_order();
  const uint begin = step.n_init, end = middle_end(), size = end - begin, each = (size + kListParts - 1) / kListParts;
  const uint first = begin + part * each + thread, own_end = min(begin + (part + 1) * each, end);
  const uint own_votes = push.base[4] + head * push.p.vote_capacity;

  // The sample is taken in runs of 8 neighbours, which are read as one.
  const uint kRun = 8, run = thread / kRun * size / (kThreads / kRun);
  uint entries[kEntries];
  [[unroll]] for (uint i = 0; i < kVotes; ++i) entries[i] = min(first + i * kThreads, end - 1);
  entries[kVotes] = min(begin + run + thread % kRun, end - 1);
  LogSum sums[kEntries];
  [[unroll]] for (uint i = 0; i < kEntries; ++i) sums[i] = kNoSum;
  for (uint done = 0; done < push.p.group; done += kQueries) {
    float said[kQueries * kEntries];
    [[unroll]] for (uint j = 0; j < kQueries; ++j) {
      const uint query = head * push.p.group + min(done + j, push.p.group - 1);
      const float query_lse = lse[push.base[1] + query];
      [[unroll]] for (uint i = 0; i < kEntries; ++i)
        said[j * kEntries + i] = scores[push.base[0] + query * push.p.score_capacity + entries[i]] - query_lse;
    }
    [[unroll]] for (uint i = 0; i < kEntries; ++i) {
      if (i < kVotes && first + i * kThreads >= own_end) continue;
      [[unroll]] for (uint j = 0; j < kQueries; ++j)
        if (done + j < push.p.group) sums[i] = added(sums[i], said[j * kEntries + i]);
    }
  }

  const Bins bins = bins_around_threshold(order_bits(log_sum_bits(sums[kVotes])), size);
  clear_histogram();
  [[unroll]] for (uint i = 0; i < kVotes; ++i) {
    const uint entry = first + i * kThreads, bits = log_sum_bits(sums[i]), key = order_bits(bits);
    if (entry >= own_end) continue;
    votes[own_votes + entry] = bits;
    atomicAdd(histogram[key < bins.low ? 0 : min((key - bins.low) >> bins.shift, kBins - 1)], 1);
  }
  for (uint i = part * kThreads + thread; i < step_entries() - size; i += kListParts * kThreads)
    votes[own_votes + (i < begin ? i : i + size)] = kMinusInfinity;
  barrier();

  const uint all_counts = push.base[5] + head * kListParts * kBins;
  for (uint bin = thread; bin < kBins; bin += kThreads) counts[all_counts + part * kBins + bin] = histogram[bin];
  if (!finishes_last(push.base[7] + head, kListParts)) return;
  for (uint bin = thread; bin < kBins; bin += kThreads) {
    uint sum = 0;
    [[unroll]] for (uint i = 0; i < kListParts; ++i) sum += counts[all_counts + i * kBins + bin];
    histogram[bin] = sum;
  }
  barrier();
  const Bin found = find_bin(step.select_k);
  if (thread == 0) store_span(push.base[6] + 4 * head, bins, found);
}

void main() {
  const bool hit = kHasGate && gate[push.base[3]] != 0;  // read at once with the step
  if (!selects() || hit) return;
  if (step.vote_scope == kVoteGroup)
    group_votes();
  else
    layer_votes();
}
