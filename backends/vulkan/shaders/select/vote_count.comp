// vote of groups, if top_k lists the votes next. The workgroups of a head also count the keys of its votes
// and sort them by bin, so that the listing workgroups find the smallest picked vote among those of one bin.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../../pool_parts.h"
#include "../../select/top_k.h"
#include "../../../order_bits.h"
#include "../step.glsl"
#include "bins.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = kVoteBins;
layout(constant_id = 1) const bool kHasGate = false;
layout(constant_id = 2) const uint kVotes = 4;          // the most votes per thread
// There are parts of log-sum-exps from token_score.comp
layout(constant_id = 3) const bool kHasParts = false;
layout(constant_id = 4) const uint kLanes = 32;        // lanes per subgroup

// For top_k_votes.comp, per head: [parts][bins], the number of a part's votes in a bin or above it;
// [parts][kPartVotes], their {key, entry}, bin by bin from the top; and {low, shift} of the bins.
layout(set = 0, binding = 6, std430) writeonly buffer Reach { uint reach[]; };
layout(set = 0, binding = 7, std430) writeonly buffer Sorted { uvec2 sorted[]; };
layout(set = 0, binding = 8, std430) writeonly buffer BinsOf { uvec2 bins_of[]; };
layout(set = 0, binding = 9, std430) readonly buffer Parts { vec2 part_sums[]; };  // [query heads][kMostScoreParts]{peak, sum}
layout(push_constant) uniform Push {
  VoteParams p;
  uint base[9];
} push;

const uint kTile = kThreads, kPartVotes = kVotes * kThreads;
#include "../lanes.glsl"
#include "../scan.glsl"
layout(set = 0, binding = 2, std430) buffer Lse { float lse[]; };
#include "vote.glsl"

// Bins per thread, which descend with threads, and the first of them.
const uint kBinsEach = kVoteBins / kThreads;
uint top_bin() { return kVoteBins - 1 - thread_in_order() * kBinsEach; }
// The bins of keys: bin b has those from low + (b << shift) on. The first bin also gets all keys below it,
// the last one all above.
struct Bins {
  uint low, shift;
};

shared uint smallest, largest, low_bin, high_bin;
shared uint sample_counts[kVoteBins], counts[kVoteBins];

// If all `size` votes were distributed like the sample, the smallest picked vote would have `rank` in it.
// This is not certain, because neighbours, which are sampled together, are often alike. The bins therefore
// reach from an eighth of the sample above to an eighth below, but not to its ends, where single votes may be
// far from all others. With 16,100 votes, normally distributed or in runs of similar neighbours, a bin then
// has ten to forty votes; with bins between the ends it has hundreds or thousands. The counts are zeros
// before.
Bins bins_around_threshold(uint sample_key, uint size) {
  const uint low = subgroupMin(sample_key), high = subgroupMax(sample_key);
  if (subgroupElect()) {
    atomicMin(smallest, low);
    atomicMax(largest, high);
  }
  barrier();
  const uint first = smallest, shift = bin_shift(largest - first, kVoteBins);
  atomicAdd(sample_counts[(sample_key - first) >> shift], 1);
  barrier();
  const uint rank = step.select_k * kThreads / size;  // how many of the sample are picked
  const uint high_rank = max(rank - min(kThreads / 8, rank * 3 / 4), 1);
  const uint low_rank = rank + min(kThreads / 8, (kThreads - rank) * 3 / 4);
  uint own = 0;
  [[unroll]] for (uint i = 0; i < kBinsEach; ++i) own += sample_counts[top_bin() - i];
  uint above = scan_threads(own).x;
  [[unroll]] for (uint i = 0; i < kBinsEach; ++i) {
    const uint reached = above + sample_counts[top_bin() - i];
    if (above < high_rank && high_rank <= reached) high_bin = top_bin() - i;
    if (above < low_rank && low_rank <= reached) low_bin = top_bin() - i;
    above = reached;
  }
  barrier();
  return Bins(first + (low_bin << shift), bin_shift(((high_bin + 1 - low_bin) << shift) - 1, kVoteBins));
}
uint bin_of(uint key, Bins bins) {
  return key < bins.low ? 0 : min((key - bins.low) >> bins.shift, kVoteBins - 1);
}

// The log-sum-exps of the head's queries.
shared float lses[kMostCountedGroup];
void find_lses(uint head) {
  [[dont_unroll]] for (uint query = gl_SubgroupID; query < push.p.group; query += gl_NumSubgroups) {
    const uint at = head * push.p.group + query;
    float found;
    if (kHasParts) {
      LogSum all = kNoSum;
      [[dont_unroll]] for (uint first = 0; first < kMostScoreParts; first += kLanes) {
        const uint i = first + gl_SubgroupInvocationID;
        const vec2 of_part = part_sums[push.base[8] / 2 + at * kMostScoreParts + min(i, kMostScoreParts - 1)];
        if (i < kMostScoreParts) all = added(all, LogSum(of_part.x, of_part.y));
      }
      const float peak = max_of_lanes(all.peak);
      found = uintBitsToFloat(log_sum_bits(LogSum(peak, sum_of_lanes(all.sum * exp(all.peak - peak)))));
      if (gl_WorkGroupID.x == 0 && gl_SubgroupInvocationID == 0) lse[push.base[1] + at] = found;
    } else {
      found = lse[push.base[1] + at];
    }
    if (gl_SubgroupInvocationID == 0) lses[query] = found;
  }
}

// A thread's votes, followed by one of the sample, which is the same in all workgroups of a head.
const uint kEntries = kVotes + 1;
// Queries that are read at once for all of them.
const uint kQueries = 4;

void group_votes(uint head, uint n) {
  const uint part = gl_WorkGroupID.x, thread = thread_in_order();
  const uint begin = step.n_init, end = middle_end(step, n), size = end - begin, each = (size + kListParts - 1) / kListParts;
  const uint first = begin + part * each + thread, own_end = min(begin + (part + 1) * each, end);
  const uint own_votes = push.base[4] + head * push.p.vote_capacity;
  for (uint bin = thread; bin < kVoteBins; bin += kThreads) sample_counts[bin] = counts[bin] = 0;
  if (thread == 0) {
    smallest = 0xffffffff;
    largest = 0;
  }
  find_lses(head);
  barrier();

  // The sample consists of runs of 8 neighbours, which are read together.
  const uint kRun = 8, run = thread / kRun * size / (kThreads / kRun);
  uint entries[kEntries];
  [[unroll]] for (uint i = 0; i < kVotes; ++i) entries[i] = min(first + i * kThreads, end - 1);
  entries[kVotes] = min(begin + run + thread % kRun, end - 1);
  LogSum sums[kEntries];
  [[unroll]] for (uint i = 0; i < kEntries; ++i) sums[i] = kNoSum;
  [[dont_unroll]] for (uint done = 0; done < push.p.group; done += kQueries) {
    float said[kQueries * kEntries];
    [[unroll]] for (uint j = 0; j < kQueries; ++j) {
      const uint query = min(done + j, push.p.group - 1);
      const uint at = push.base[0] + (head * push.p.group + query) * push.p.score_capacity;
      [[unroll]] for (uint i = 0; i < kEntries; ++i)
        said[j * kEntries + i] = scores[at + entries[i]] - lses[query];
    }
    [[unroll]] for (uint i = 0; i < kEntries; ++i) {
      vec4 of_queries;
      [[unroll]] for (uint j = 0; j < kQueries; ++j) of_queries[j] = said[j * kEntries + i];
      sums[i] = added(sums[i], of_queries, push.p.group - done);
    }
  }

  const Bins bins = bins_around_threshold(order_bits(log_sum_bits(sums[kVotes])), size);
  uint keys[kVotes];
  [[unroll]] for (uint i = 0; i < kVotes; ++i) {
    const uint entry = first + i * kThreads, bits = log_sum_bits(sums[i]);
    keys[i] = order_bits(bits);
    if (entry >= own_end) continue;
    votes[own_votes + entry] = bits;
    atomicAdd(counts[bin_of(keys[i], bins)], 1);
  }
  for (uint i = part * kThreads + thread; i < n - size; i += kListParts * kThreads)
    votes[own_votes + (i < begin ? i : i + size)] = kMinusInfinity;
  if (part == 0 && thread == 0) bins_of[push.base[7] / 2 + head] = uvec2(bins.low, bins.shift);
  barrier();

  uint own = 0;
  [[unroll]] for (uint i = 0; i < kBinsEach; ++i) own += counts[top_bin() - i];
  uint above = scan_threads(own).x;
  [[unroll]] for (uint i = 0; i < kBinsEach; ++i) {
    const uint bin = top_bin() - i, before = above;
    above += counts[bin];
    counts[bin] = before;  // where the bin's votes begin
    reach[push.base[5] + (head * kListParts + part) * kVoteBins + bin] = above;
  }
  barrier();
  [[unroll]] for (uint i = 0; i < kVotes; ++i) {
    const uint entry = first + i * kThreads;
    if (entry >= own_end) continue;
    const uint at = atomicAdd(counts[bin_of(keys[i], bins)], 1);
    sorted[push.base[6] / 2 + (head * kListParts + part) * kPartVotes + at] = uvec2(keys[i], entry);
  }
}

void main() {
  const bool hit = kHasGate && gate[push.base[3]] != 0;  // loaded together with the step
  const uint head = gl_WorkGroupID.y, n = step_entries(step, head_states[push.p.head_state + head]);
  if (!selects(step, n) || hit) return;
  group_votes(head, n);
}
