// top_k: scores become ascending lists; a workgroup makes the list of one head, with all keys in its registers.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "top_k.glsl"

layout(constant_id = 3) const uint kKeysEach = 16;  // of a thread, at most 32; at most kBins of a subgroup's lanes

shared uint smallest, largest;
uint keys[kKeysEach];  // of the candidates of this thread

// Thread and turn say which index of a range a key has, and how many turns a thread has.
uint index_of(Range range, uint j) { return range.begin + j * kThreads + thread_in_order(); }
uint turns_in(Range range) { return (range.end - range.begin + kThreads - 1 - thread_in_order()) / kThreads; }

// Of the candidates that threads have marked, one bit a turn: histogram[] holds their bits in order, kWordBits in a word, of
// which a thread takes kWordsEach neighbours. Returns how many are marked in words before its own, and in all.
const uint kMostWordBits = 32, kWordsEach = kBins / kThreads;
uint word_bits() { return min(gl_SubgroupSize, kMostWordBits); }
uvec2 put_in_order(uint marks) {
  const uint words = (gl_SubgroupSize + kMostWordBits - 1) / kMostWordBits;  // of a subgroup's turn
  barrier();
  [[unroll]] for (uint j = 0; j < kKeysEach; ++j) {
    const uvec4 bits = subgroupBallot((marks >> j & 1) != 0);
    if (subgroupElect())
      for (uint k = 0; k < words; ++k) histogram[(j * gl_NumSubgroups + gl_SubgroupID) * words + k] = bits[k];
  }
  for (uint i = kKeysEach * gl_NumSubgroups * words + thread_in_order(); i < kBins; i += kThreads) histogram[i] = 0;
  barrier();
  uint own = 0;
  for (uint i = 0; i < kWordsEach; ++i) own += bitCount(histogram[thread_in_order() * kWordsEach + i]);
  return scan_threads(own);
}

// The smallest of the `wanted` largest candidates among those with keys in [low, low + width], of which there are no more than
// kFew: each counts those above it.
const uint kFew = 128;
shared uint few, found_key;
Lowest find_among_few(uint turns, uint low, uint width, uint wanted) {
  if (thread_in_order() == 0) few = 0;
  barrier();
  [[unroll]] for (uint j = 0; j < kKeysEach; ++j)
    if (j < turns && keys[j] - low <= width) {
      const uint at = atomicAdd(few, 1);
      histogram[2 * at] = keys[j];
      histogram[2 * at + 1] = index_of(candidates, j);
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
Lowest find_lowest(uint turns) {
  uint low = 0xffffffff, high = 0;
  [[unroll]] for (uint j = 0; j < kKeysEach; ++j)
    if (j < turns) {
      low = min(low, keys[j]);
      high = max(high, keys[j]);
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
    barrier();
    for (uint bin = thread_in_order(); bin < kBins; bin += kThreads) histogram[bin] = 0;
    barrier();
    [[unroll]] for (uint j = 0; j < kKeysEach; ++j) {
      const uint above = keys[j] - low;  // a large number below it
      if (j < turns && above <= width) atomicAdd(histogram[above >> shift], 1);
    }
    barrier();
    found = find_bin(found.wanted);
    low += found.bin << shift;
    width = (1 << shift) - 1;
    if (found.wanted == found.count) return Lowest(low, 0);
    if (found.count <= kFew) return find_among_few(turns, low, width, found.wanted);
  } while (width > 0);

  // Nothing but ties is left: those with the largest indices are picked.
  uint ties = 0;
  [[unroll]] for (uint j = 0; j < kKeysEach; ++j)
    ties |= j < turns && keys[j] == low ? 1 << j : 0;
  const uvec2 sums = put_in_order(ties);
  uint rank = sums.x;
  for (uint i = 0; i < kWordsEach; ++i) {
    const uint word = thread_in_order() * kWordsEach + i;
    for (uint bits = histogram[word]; bits != 0; bits &= bits - 1, ++rank)
      if (rank == sums.y - found.wanted) found_index = candidates.begin + word * word_bits() + findLSB(bits);
  }
  barrier();
  return Lowest(low, found_index);
}

void main() {
  set_head(gl_WorkGroupID.x);
  const uint to_do = task();
  if (to_do == kListEverything) list_everything(step_entries(), thread_in_order(), kThreads);
  if (to_do == kRenewLocal) renew_local();
  if (to_do != kPick) return;

  const uint turns = turns_in(candidates);
  [[unroll]] for (uint j = 0; j < kKeysEach; ++j) keys[j] = j < turns ? key_at(index_of(candidates, j)) : 0;
  const Lowest lowest = picks_all_or_none() ? lowest_of_all_or_none() : find_lowest(turns);
  uint picked = 0;
  if (shares_threshold()) {
    const uint own_turns = turns_in(middle);
    for (uint first = 0; first < own_turns; first += kLoads)
      [[unroll]] for (uint j = first; j < first + kLoads; ++j) {
        const bool is = is_picked(min(index_of(middle, j), middle.end - 1), lowest);
        picked |= is && j < own_turns ? 1 << j : 0;
      }
  } else {
    [[unroll]] for (uint j = 0; j < kKeysEach; ++j)
      picked |= j < turns && reaches(keys[j], index_of(middle, j), lowest) ? 1 << j : 0;
  }
  const uvec2 sums = put_in_order(picked);
  uint to = own_list + 1 + middle.begin + sums.x;
  for (uint i = 0; i < kWordsEach; ++i) {
    const uint word = thread_in_order() * kWordsEach + i;
    for (uint bits = histogram[word]; bits != 0; bits &= bits - 1, ++to)
      list[to] = middle.begin + word * word_bits() + findLSB(bits);
  }
  list_ends(sums.y);
}
