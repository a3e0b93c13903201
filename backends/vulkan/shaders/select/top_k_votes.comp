// top_k of a group's votes that vote_count.comp has counted. Each of several workgroups of a head finds the
// smallest picked vote and writes its part of the list.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "top_k_find.glsl"
#include "top_k_own.glsl"

// As vote_count.comp has left them
layout(set = 0, binding = 6, std430) readonly buffer Reach { uint reach[]; };
layout(set = 0, binding = 7, std430) readonly buffer Sorted { uvec2 sorted[]; };
layout(set = 0, binding = 8, std430) readonly buffer BinsOf { uvec2 bins_of[]; };

uint reach_at(uint head, uint part, uint bin) {
  return push.base[5] + (head * kListParts + part) * kVoteBins + bin;
}

shared uint totals[kVoteBins + 1];  // votes of all parts in a bin or above it
shared uint found_vote_bin;
// For each part: votes above the bin of the smallest picked vote, and votes in it or above.
shared uint above_bin[kListParts], reach_bin[kListParts];
shared uint picked_before;

// The votes of the bin, ordered by part: where the i-th is in `sorted`.
uint sorted_at(uint head, uint i) {
  uint part = 0;
  for (; part + 1 < kListParts && i >= reach_bin[part] - above_bin[part]; ++part) i -= reach_bin[part] - above_bin[part];
  return push.base[6] / 2 + (head * kListParts + part) * kPartVotes + above_bin[part] + i;
}

// The result of the counts: the smallest picked vote, if there are few in its bin; otherwise the bin's span.
struct Counted {
  bool among_few;
  Lowest lowest;
  uint before;  // how many votes of earlier parts are picked
  Span span;
};
// Issued before the step is known, which is still being loaded.
void add_up_counts(uint head) {
  for (uint bin = thread_in_order(); bin < kVoteBins; bin += kThreads) {
    uint sum = 0;
    [[unroll]] for (uint i = 0; i < kListParts; ++i) sum += reach[reach_at(head, i, bin)];
    totals[bin] = sum;
  }
  if (thread_in_order() == 0) totals[kVoteBins] = picked_before = 0;
}
Counted find_counted(uint part, uint head, uint own_begin) {
  const uint thread = thread_in_order();
  barrier();
  for (uint bin = thread; bin < kVoteBins; bin += kThreads)
    if (totals[bin] >= wanted && totals[bin + 1] < wanted) found_vote_bin = bin;
  barrier();
  const uint bin = found_vote_bin, above = totals[bin + 1], count = totals[bin] - above;
  if (count > kFew) {
    const uvec2 low_shift = bins_of[push.base[7] / 2 + head];
    const uint low = bin == 0 ? 0 : low_shift.x + (bin << low_shift.y);
    const uint high = bin == kVoteBins - 1 ? 0xffffffff : low_shift.x + ((bin + 1) << low_shift.y) - 1;
    return Counted(false, Lowest(0, 0), 0, Span(low, high - low, wanted - above, count));
  }
  if (thread < kListParts) {
    reach_bin[thread] = reach[reach_at(head, thread, bin)];
    above_bin[thread] = bin + 1 < kVoteBins ? reach[reach_at(head, thread, bin + 1)] : 0;
  }
  if (thread == 0) few = count;
  barrier();
  for (uint i = thread; i < count; i += kThreads) {
    const uvec2 vote = sorted[sorted_at(head, i)];
    few_keys[i] = vote.x;
    few_indices[i] = vote.y;
  }
  barrier();
  for (uint i = gl_SubgroupID; i < count; i += gl_NumSubgroups) {
    const uint larger = few_above(i);
    if (larger == wanted - above - 1) found_lowest = Lowest(few_keys[i], few_indices[i]);
    if (larger < wanted - above && few_indices[i] < own_begin && subgroupElect()) atomicAdd(picked_before, 1);
  }
  barrier();
  uint before = picked_before;
  for (uint i = 0; i < part; ++i) before += above_bin[i];
  return Counted(true, found_lowest, before, Span(0, 0, 0, 0));
}

void main() {
  const uint part = gl_WorkGroupID.x, head = gl_WorkGroupID.y;
  add_up_counts(head);
  set_head(head);
  const uint to_do = task();
  if (to_do == kListEverything) list_everything(part * kThreads + thread_in_order(), kListParts * kThreads);
  if (to_do == kRenewLocal && part == 0) renew_local();
  if (to_do != kPick) return;

  const Range own = part_of(middle, part, kListParts);
  Lowest lowest = lowest_of_all_or_none();
  if (!picks_all_or_none()) {
    const Counted found = find_counted(part, head, own.begin);
    if (found.among_few) {
      write_own(own, found.lowest, found.before, 1);
      if (part == kListParts - 1) list_ends(wanted);
      return;
    }
    lowest = find_lowest(found.span);
  }
  uint before = 0;
  if (part > 0) before = count_picked(Range(middle.begin, own.begin), lowest).y;
  write_part(own, lowest, before, part == kListParts - 1);
}
