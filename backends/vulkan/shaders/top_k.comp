// top_k: scores become ascending lists. A workgroup makes the list of one head; or, of votes that vote_count.comp has counted,
// one of several writes its part of it.
//
// Every pass reads the keys anew, from the cache. With up to 32 of a thread's in registers an H200's lists were wrong for some
// numbers of them, others in every variant of the code, or its compiler crashed (driver 580); lavapipe's were right.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "top_k.glsl"

layout(constant_id = 3) const bool kCounted = false;  // scratch: [heads] of what vote_count.comp has found

// Where the smallest candidate that is picked must be: among those with keys in [low, low + width].
struct Span {
  uint low, width;
  uint wanted;  // how many of them are picked
  uint count;   // and how many there are
};

Span counted_span(uint head) {
  if (!kCounted) return Span(0, 0, 0, 0);
  const uint at = push.base[5] + 4 * head;
  return Span(scratch[at], scratch[at + 1], scratch[at + 2], scratch[at + 3]);
}

Span span_of_all() {
  uint low = 0xffffffff, high = 0;
  for (uint first = candidates.begin; first < candidates.end; first += kLoads * kThreads) {
    uint keys[kLoads];
    load_keys(candidates, first + thread_in_order(), kThreads, keys);
    [[unroll]] for (uint j = 0; j < kLoads; ++j) {
      low = min(low, keys[j]);
      high = max(high, keys[j]);
    }
  }
  const uvec2 keys = smallest_and_largest(low, high);
  return Span(keys.x, keys.y - keys.x, wanted, candidates.end - candidates.begin);
}

// The bin of a span where it must be.
Span narrowed(Span span) {
  const uint shift = bin_shift(span.width);
  count_keys(candidates, span.low, span.width);
  const Bin found = find_bin(span.wanted);
  const uint below = found.bin << shift;
  return Span(span.low + below, min((1u << shift) - 1, span.width - below), found.wanted, found.count);
}

// What a workgroup has to know to write its part.
struct Found {
  Lowest lowest;  // candidate that is picked
  uint before;    // how many entries are picked before the part
};

Found found_by_pass(Lowest lowest, Range own) {
  uint before = 0;
  if (own.begin > middle.begin) before = count_picked(Range(middle.begin, own.begin), lowest).y;
  return Found(lowest, before);
}

// In a span of no more than kFew each counts those above it. The same pass counts what is picked before the candidate `end`.
const uint kFew = 256;
shared uint few, few_keys[kFew], few_indices[kFew], picked_before;
shared Lowest found_lowest;
Found find_among_few(Span span, uint end) {
  if (thread_in_order() == 0) few = picked_before = 0;
  barrier();
  uint larger = 0;
  for (uint first = candidates.begin; first < candidates.end; first += kLoads * kThreads) {
    const uint i = first + thread_in_order();
    uint keys[kLoads];
    load_keys(candidates, i, kThreads, keys);
    [[unroll]] for (uint j = 0; j < kLoads; ++j) {
      const uint index = i + j * kThreads, above = keys[j] - span.low;  // a large number below it
      if (index < candidates.end && above <= span.width) {
        const uint at = atomicAdd(few, 1);
        few_keys[at] = keys[j];
        few_indices[at] = index;
      }
      larger += index < end && keys[j] >= span.low && above > span.width ? 1 : 0;
    }
  }
  larger = subgroupAdd(larger);
  if (subgroupElect()) atomicAdd(picked_before, larger);
  barrier();
  for (uint own = thread_in_order(); own < few; own += kThreads) {
    const uint key = few_keys[own], index = few_indices[own];
    uint above = 0;
    for (uint i = 0; i < few; ++i)
      if (few_keys[i] > key || (few_keys[i] == key && few_indices[i] > index)) ++above;
    if (above < span.wanted && index < end) atomicAdd(picked_before, 1);
    if (above == span.wanted - 1) found_lowest = Lowest(key, index);
  }
  barrier();
  return Found(found_lowest, picked_before);
}

// Narrows the span until few are in it: scores of a few exponents would meet in a few bins if these divided all keys.
Found find(Span span, Range own) {
  while (span.wanted < span.count && span.count > kFew && span.width > 0) span = narrowed(span);
  if (span.wanted == span.count) return found_by_pass(Lowest(span.low, 0), own);
  if (span.count <= kFew) return find_among_few(span, candidates.begin + (own.begin - middle.begin));
  return found_by_pass(Lowest(span.low, tie_from_end(span.low, candidates, span.wanted)), own);
}

void main() {
  const uint part = gl_WorkGroupID.x, head = gl_WorkGroupID.y;
  Span span = counted_span(head);  // read at once with the step
  set_head(head);
  const uint to_do = task();
  if (to_do == kListEverything) list_everything(step_entries(), part * kThreads + thread_in_order(), push.parts * kThreads);
  if (to_do == kRenewLocal && part == 0) renew_local();
  const bool counted = kCounted && !shares_threshold();
  const uint parts = counted ? push.parts : 1;  // what nobody has counted a workgroup does alone
  if (to_do != kPick || part >= parts) return;

  const Range own = part_of(middle, part, parts);
  if (!counted && !picks_all_or_none()) span = span_of_all();
  const Found found = picks_all_or_none() ? found_by_pass(lowest_of_all_or_none(), own) : find(span, own);
  write_part(own, found.lowest, found.before, part == parts - 1);
}
