// top_k of a layer's votes that vote_layer.comp has counted. Each of several workgroups finds the smallest
// picked vote, among those of one bin, and writes its part of the heads' lists, which are equal. If that bin
// has too many votes, each head's workgroups narrow it further. Votes that were not counted are listed by one
// workgroup per head.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "top_k_find.glsl"
#include "layer_bins.glsl"
#include "top_k_own.glsl"

// As vote_layer.comp has left them
layout(set = 0, binding = 6, std430) readonly buffer Counts { uint counts[]; };

// Bins per thread, which descend with threads, and the first of them.
const uint kBinsEach = kLayerBins / kThreads;
uint top_bin() { return kLayerBins - 1 - thread_in_order() * kBinsEach; }
uint count_own_bins() {
  uint own = 0;
  for (uint i = 0; i < kBinsEach; ++i) own += counts[push.base[5] + count_at(top_bin() - i)];
  return own;
}

// The bin of the smallest picked vote; `own`: the total of the thread's bins.
Bin counted_bin(uint own) {
  uint above = scan_threads(own).x;
  if (above < wanted && wanted <= above + own)
    for (uint i = 0; i < kBinsEach; ++i) {
      const uint count = counts[push.base[5] + count_at(top_bin() - i)];
      if (wanted <= above + count) {
        found_bin = Bin(top_bin() - i, wanted - above, count);
        break;
      }
      above += count;
    }
  barrier();
  return found_bin;
}

shared uint picked_before;

// The smallest picked vote among the few of a bin, and how many of the votes before `own_begin` are picked.
// The few are counted again in finer bins, and only those of one finer bin are all compared with each other:
// comparing all of 500 took 14 us longer.
Lowest find_among_few(Bin bin, uint own_begin, out uint before) {
  const float most = uintBitsToFloat(counts[push.base[5] + kLayerMost]);
  const int own_step = step_of_bin(bin.bin);
  if (thread_in_order() == 0) few = picked_before = 0;
  clear_histogram();
  uint above = 0;
  const uint kAtOnce = 2 * kLoads;
  for (uint first = candidates.begin; first < candidates.end; first += kAtOnce * kThreads) {
    const uint i = first + thread_in_order();
    uint votes[kAtOnce], in_bin = 0;
    [[unroll]] for (uint j = 0; j < kAtOnce; ++j) votes[j] = scores[own_scores + min(i + j * kThreads, candidates.end - 1)];
    [[unroll]] for (uint j = 0; j < kAtOnce; ++j) {
      const int step = step_of(bits_below(most, votes[j]));
      if (i + j * kThreads < own_begin && step < own_step) ++above;
      if (i + j * kThreads < candidates.end && step == own_step) in_bin |= 1u << j;
    }
    // a loop keeps the code small; it runs for few
    [[dont_unroll]] for (; in_bin != 0; in_bin &= in_bin - 1) {
      const uint own = i + findLSB(in_bin) * kThreads, vote = scores[own_scores + own], at = atomicAdd(few, 1);
      const uint finer = finer_bin(bits_below(most, vote));
      few_keys[at] = order_bits(vote);
      few_indices[at] = finer << 16 | own;
      atomicAdd(histogram[finer], 1);
    }
  }
  barrier();
  const Bin finer = find_bin(bin.wanted);
  for (uint i = gl_SubgroupID; i < few; i += gl_NumSubgroups) {
    const uint own_bin = few_indices[i] >> 16, index = few_indices[i] & 0xffff;
    if (own_bin < finer.bin) continue;
    const uint larger = own_bin > finer.bin ? 0 : few_above(i);
    if (larger == bin.wanted - 1 && own_bin == finer.bin) found_lowest = Lowest(few_keys[i], index);
    if (larger < bin.wanted && index < own_begin && subgroupElect()) ++above;
  }
  above = subgroupAdd(above);
  if (subgroupElect()) atomicAdd(picked_before, above);
  barrier();
  before = picked_before;
  return found_lowest;
}

void main() {
  const uint part = gl_WorkGroupID.x, head = gl_WorkGroupID.y;
  // Issued before the step is known, which is still being loaded.
  const uint own_count = count_own_bins();
  const bool counted = counts[push.base[5] + kLayerCounted] != 0;
  set_head(head);
  if (counted) candidates = middle;  // entries are positions
  const uint to_do = task(), parts = counted ? kListParts : 1;
  if (to_do == kListEverything) list_everything(part * kThreads + thread_in_order(), kListParts * kThreads);
  if (to_do == kRenewLocal && part == 0) renew_local();
  if (to_do != kPick || part >= parts) return;

  const Range own = part_of(middle, part, parts);
  Lowest lowest = lowest_of_all_or_none();
  if (!picks_all_or_none()) {
    if (counted) {
      const Bin bin = counted_bin(own_count);
      if (bin.count <= kFew && bin.bin > 0 && bin.bin < kLayerBins - 1) {
        if (part == parts - 1) list_ends(wanted);
        if (head > 0) return;
        uint before;
        lowest = find_among_few(bin, own.begin, before);
        write_own(own, lowest, before, push.p.heads);
        return;
      }
    }
    lowest = find_lowest(span_of_all());
  }
  uint before = 0;
  if (part > 0) before = count_picked(Range(middle.begin, own.begin), lowest).y;
  write_part(own, lowest, before, part == parts - 1);
}
