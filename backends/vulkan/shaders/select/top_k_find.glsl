// How a single workgroup finds the smallest candidate that is picked.
//
// Every pass reads the keys again, from the cache. With up to 32 keys per thread in registers, an H200's
// lists were wrong for some of these numbers, different ones in every variant of the code, or its compiler
// crashed (driver 580); lavapipe's were right.
#include "top_k.glsl"

// The smallest candidate that is picked has a key in [low, low + width].
struct Span {
  uint low, width;
  uint wanted;  // how many of the keys in it are picked
  uint count;   // number of keys in it
};

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

// The bin of a span that contains it.
Span narrowed(Span span) {
  const uint shift = bin_shift(span.width, kBins);
  count_keys(candidates, span.low, span.width);
  const Bin found = find_bin(span.wanted);
  const uint below = found.bin << shift;
  return Span(span.low + below, min((1u << shift) - 1, span.width - below), found.wanted, found.count);
}

// Gathers the `few` candidates of a span and finds the smallest that is picked: a subgroup counts those above
// one of them, then above the next, and so on.
const uint kFew = 512;
shared uint few, few_keys[kFew], few_indices[kFew];
shared Lowest found_lowest;
uint few_above(uint own) {
  const uint key = few_keys[own], index = few_indices[own];
  uint above = 0;
  for (uint first = 0; first < few; first += gl_SubgroupSize) {
    const uint i = first + gl_SubgroupInvocationID, at = min(i, kFew - 1), other = few_keys[at];
    const bool larger = other > key || (other == key && few_indices[at] > index);
    above += subgroupBallotBitCount(subgroupBallot(i < few && larger));
  }
  return above;
}
Lowest find_among_few(Span span) {
  if (thread_in_order() == 0) few = 0;
  barrier();
  for (uint first = candidates.begin; first < candidates.end; first += kLoads * kThreads) {
    const uint i = first + thread_in_order();
    uint keys[kLoads];
    load_keys(candidates, i, kThreads, keys);
    [[unroll]] for (uint j = 0; j < kLoads; ++j)
      if (i + j * kThreads < candidates.end && keys[j] - span.low <= span.width) {
        const uint at = atomicAdd(few, 1);
        few_keys[at] = keys[j];
        few_indices[at] = i + j * kThreads;
      }
  }
  barrier();
  for (uint own = gl_SubgroupID; own < few; own += gl_NumSubgroups)
    if (few_above(own) == span.wanted - 1) found_lowest = Lowest(few_keys[own], few_indices[own]);
  barrier();
  return found_lowest;
}

// Narrows the span until few candidates are in it. Without a span around the actual keys, scores with a few
// exponents would be in a few bins only.
Lowest find_lowest(Span span) {
  while (span.wanted < span.count && span.count > kFew && span.width > 0) span = narrowed(span);
  if (span.wanted == span.count) return Lowest(span.low, 0);
  if (span.count <= kFew) return find_among_few(span);
  return Lowest(span.low, tie_from_end(span.low, candidates, span.wanted));
}
