// top_k: scores become ascending lists; a workgroup makes the list of one head.
//
// Every pass reads the keys anew, from the cache. With up to 32 of a thread's in registers an H200's lists were wrong for some
// numbers of them, others in every variant of the code, or its compiler crashed (driver 580); lavapipe's were right.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "top_k.glsl"

// The smallest of the `wanted` largest candidates among those with keys in [low, low + width], of which there are no more than
// kFew: each counts those above it.
const uint kFew = 128;
shared uint few, found_key;
Lowest find_among_few(uint low, uint width, uint wanted) {
  if (thread_in_order() == 0) few = 0;
  barrier();
  for (uint i = candidates.begin + thread_in_order(); i < candidates.end; i += kLoads * kThreads) {
    uint keys[kLoads];
    [[unroll]] for (uint j = 0; j < kLoads; ++j) keys[j] = key_at(min(i + j * kThreads, candidates.end - 1));
    [[unroll]] for (uint j = 0; j < kLoads; ++j)
      if (i + j * kThreads < candidates.end && keys[j] - low <= width) {
        const uint at = atomicAdd(few, 1);
        histogram[2 * at] = keys[j];
        histogram[2 * at + 1] = i + j * kThreads;
      }
  }
  barrier();
  if (thread_in_order() < few) {
    const uint key = histogram[2 * thread_in_order()], index = histogram[2 * thread_in_order() + 1];
    uint above = 0;
    for (uint i = 0; i < few; ++i)
      if (histogram[2 * i] > key || (histogram[2 * i] == key && histogram[2 * i + 1] > index)) ++above;
    if (above == wanted - 1) {
      found_key = key;
      found_index = index;
    }
  }
  barrier();
  return Lowest(found_key, found_index);
}

// The smallest candidate that is picked. Bins divide what lies between the smallest key and the largest, then the bin where it
// must be, and so on, until few are in it: scores of a few exponents would meet in a few bins if these divided all keys.
shared uint smallest, largest;
Lowest find_lowest() {
  uint low = 0xffffffff, high = 0;
  for (uint i = candidates.begin + thread_in_order(); i < candidates.end; i += kLoads * kThreads) {
    uint keys[kLoads];
    [[unroll]] for (uint j = 0; j < kLoads; ++j) keys[j] = key_at(min(i + j * kThreads, candidates.end - 1));
    [[unroll]] for (uint j = 0; j < kLoads; ++j) {
      low = min(low, keys[j]);
      high = max(high, keys[j]);
    }
  }
  if (thread_in_order() == 0) {
    smallest = 0xffffffff;
    largest = 0;
  }
  barrier();
  low = subgroupMin(low);
  high = subgroupMax(high);
  if (subgroupElect()) {
    atomicMin(smallest, low);
    atomicMax(largest, high);
  }
  barrier();
  low = smallest;
  Bin found = Bin(0, wanted, 0);
  uint width = largest - low;
  do {
    const uint shift = bin_shift(width);
    count_keys(candidates, low, width);
    found = find_bin(found.wanted);
    low += found.bin << shift;
    width = (1 << shift) - 1;
    if (found.wanted == found.count) return Lowest(low, 0);
    if (found.count <= kFew) return find_among_few(low, width, found.wanted);
  } while (width > 0);
  return Lowest(low, tie_from_end(low, candidates, found.wanted));
}

void main() {
  set_head(gl_WorkGroupID.x);
  const uint to_do = task();
  if (to_do == kListEverything) list_everything(step_entries(), thread_in_order(), kThreads);
  if (to_do == kRenewLocal) renew_local();
  if (to_do != kPick) return;

  const Lowest lowest = picks_all_or_none() ? lowest_of_all_or_none() : find_lowest();
  const uvec2 counts = count_picked(middle, lowest);
  write_picked(middle, lowest, own_list + 1 + middle.begin + counts.x);
  list_ends(counts.y);
}
