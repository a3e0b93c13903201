// top_k of a layer's votes that vote_layer.comp has counted: each of several workgroups finds the smallest that is picked, among
// those of one bin, and writes its part of the heads' lists, which are alike. Where one bin has too many, each head's workgroups
// look further; votes that were not counted one workgroup a head lists alone.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "top_k_find.glsl"
#include "top_k_own.glsl"

layout(set = 0, binding = 6, std430) readonly buffer Counts { uint counts[]; };  // as vote_layer.comp has left them

// Bins of a thread, which descend with threads, and the first of them.
const uint kBinsEach = kLayerBins / kThreads;
uint top_bin() { return kLayerBins - 1 - thread_in_order() * kBinsEach; }
uint count_own_bins() {
  uint own = 0;
  for (uint i = 0; i < kBinsEach; ++i) own += counts[push.base[5] + top_bin() - i];
  return own;
}

// The bin of the smallest vote that is picked; `own`: what the thread's bins have.
Span counted_span(uint own) {
  uint above = scan_threads(own).x;
  if (above < wanted && wanted <= above + own)
    for (uint i = 0; i < kBinsEach; ++i) {
      const uint count = counts[push.base[5] + top_bin() - i];
      if (wanted <= above + count) {
        found_bin = Bin(top_bin() - i, wanted - above, count);
        break;
      }
      above += count;
    }
  barrier();
  const Bin found = found_bin;
  const uint low = found.bin == 0 ? 0 : kLayerLow + (found.bin << kLayerShift);
  const uint high = found.bin == kLayerBins - 1 ? 0xffffffff : kLayerLow + ((found.bin + 1) << kLayerShift) - 1;
  return Span(low, high - low, found.wanted, found.count);
}

shared uint picked_before;

// The smallest vote that is picked, of few in the span; and how many of those before `own_begin` are picked.
Lowest find_among_few(Span span, uint own_begin, out uint before) {
  if (thread_in_order() == 0) few = picked_before = 0;
  barrier();
  uint above = 0;
  const uint kAtOnce = 2 * kLoads;
  for (uint first = candidates.begin; first < candidates.end; first += kAtOnce * kThreads) {
    const uint i = first + thread_in_order();
    uint keys[kAtOnce];
    [[unroll]] for (uint j = 0; j < kAtOnce; ++j) keys[j] = key_at(min(i + j * kThreads, candidates.end - 1));
    [[unroll]] for (uint j = 0; j < kAtOnce; ++j) {
      if (i + j * kThreads < own_begin && keys[j] > span.low + span.width) ++above;
      if (i + j * kThreads < candidates.end && keys[j] - span.low <= span.width) {
        const uint at = atomicAdd(few, 1);
        few_keys[at] = keys[j];
        few_indices[at] = i + j * kThreads;
      }
    }
  }
  above = subgroupAdd(above);
  if (subgroupElect()) atomicAdd(picked_before, above);
  barrier();
  for (uint i = gl_SubgroupID; i < few; i += gl_NumSubgroups) {
    const uint larger = few_above(i);
    if (larger == span.wanted - 1) found_lowest = Lowest(few_keys[i], few_indices[i]);
    if (larger < span.wanted && few_indices[i] < own_begin && subgroupElect()) atomicAdd(picked_before, 1);
  }
  barrier();
  before = picked_before;
  return found_lowest;
}

void main() {
  const uint part = gl_WorkGroupID.x, head = gl_WorkGroupID.y;
  // Before anything is known of the step, which is on its way meanwhile.
  const uint own_count = count_own_bins();
  const bool counted = counts[push.base[5] + kLayerBins] != 0;
  set_head(head);
  if (counted) candidates = middle;  // entries are positions
  const uint to_do = task(), parts = counted ? kListParts : 1;
  if (to_do == kListEverything) list_everything(part * kThreads + thread_in_order(), kListParts * kThreads);
  if (to_do == kRenewLocal && part == 0) renew_local();
  if (to_do != kPick || part >= parts) return;

  const Range own = part_of(middle, part, parts);
  Lowest lowest = lowest_of_all_or_none();
  if (!picks_all_or_none()) {
    Span span;
    if (counted)
      span = counted_span(own_count);
    else
      span = span_of_all();
    if (counted && span.count <= kFew) {
      if (head > 0) return;
      uint before;
      lowest = find_among_few(span, own.begin, before);
      write_own(own, lowest, before, part == parts - 1, push.p.heads);
      return;
    }
    lowest = find_lowest(span);
  }
  uint before = 0;
  if (part > 0) before = count_picked(Range(middle.begin, own.begin), lowest).y;
  write_part(own, lowest, before, part == parts - 1);
}
