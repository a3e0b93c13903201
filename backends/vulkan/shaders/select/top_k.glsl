// Shared by the shaders of top_k: the inputs of a head's list, a radix select, and ordered writing.
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../../select/top_k.h"
#include "../../../order_bits.h"
#include "../step.glsl"
#include "bins.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 128;
layout(constant_id = 1) const bool kHasGate = false;
layout(constant_id = 2) const bool kHasChunk = false;
layout(constant_id = 3) const uint kPage = 1;  // entries per unit, which has one score
#include "../scan.glsl"

layout(set = 0, binding = 1, std430) readonly buffer Scores { uint scores[]; };
layout(set = 0, binding = 2, std430) readonly buffer ChunkScores { uint chunk_scores[]; };
layout(set = 0, binding = 3, std430) readonly buffer Pos { uint pos[]; };
layout(set = 0, binding = 4, std430) readonly buffer Gate { uint gate[]; };
layout(set = 0, binding = 5, std430) buffer List { uint list[]; };
layout(push_constant) uniform Push {
  TopKParams p;
  uint parts;  // workgroups that share a head's work
  uint digit;
  uint base[8];  // as many as top_k_votes.comp has operands
} push;

// ---- what a step asks for ----

const uint kListEverything = 0, kRenewLocal = 1, kPick = 2;

// One threshold serves all heads if they vote for positions.
bool shares_threshold() { return push.p.by_position != 0; }

struct Range {
  uint begin, end;
};
// One of `parts` pieces; the last ones may be empty.
Range part_of(Range r, uint i, uint parts) {
  const uint size = r.end - r.begin, each = (size + parts - 1) / parts;
  return Range(r.begin + min(i * each, size), r.begin + min((i + 1) * each, size));
}

// A head's work; set_head() fills these in.
HeadState state;
uint entries;      // number of entries
Range middle;      // units that are listed by their score; those before and after are always listed
Range candidates;  // indices of the competing scores: the middle's units, or all positions
uint wanted;       // how many candidates are picked
uint own_scores, own_chunk_scores, own_pos, own_list;  // where the head's data begins

void set_head(uint head) {
  state = head_states[push.p.head_state + head];
  entries = step_entries(step, state);
  own_scores = push.base[0];
  if (!shares_threshold()) own_scores += push.p.in_runs != 0 ? state.first : head * push.p.score_capacity;
  own_chunk_scores = push.base[1] + head * push.p.chunk_capacity;
  own_pos = push.base[2] + state.first;
  own_list = push.base[4] + head * push.p.list_capacity;
  const Regions r = push.p.keep == kKeepOfHead ? kept_regions(state, entries)
                                               : selected_regions(step, units(entries, kPage));
  middle = candidates = Range(r.begin, r.end);
  wanted = r.wanted;
  if (shares_threshold()) candidates = Range(0, uint(step.position) + step.n_rows);
}

uint task() {
  if (push.p.keep == kKeepOfHead) return state.keep >= entries ? kListEverything : kPick;
  const bool hit = kHasGate && gate[push.base[3]] != 0;  // loaded together with the step
  return !selects(step, units(entries, kPage)) ? kListEverything : hit ? kRenewLocal : kPick;
}

uint key_at(uint i) {
  return order_bits(kHasChunk && i >= state.n_entries ? chunk_scores[own_chunk_scores + i - state.n_entries]
                                                      : scores[own_scores + i]);
}

// The smallest candidate that is picked: its key and its index.
struct Lowest {
  uint key, index;
};
// True if no score needs to be compared.
bool picks_all_or_none() { return wanted == 0 || wanted >= candidates.end - candidates.begin; }
Lowest lowest_of_all_or_none() { return wanted == 0 ? Lowest(0xffffffff, 0xffffffff) : Lowest(0, 0); }

bool reaches(uint key, uint i, Lowest lowest) {
  return key > lowest.key || (key == lowest.key && i >= lowest.index);
}
// Whether a unit of the middle is picked.
bool is_picked(uint unit, Lowest lowest) {
  const uint i = shares_threshold() ? pos[own_pos + unit] : unit;
  return reaches(key_at(i), i, lowest);
}

void list_everything(uint first, uint stride) {
  if (first == 0) list[own_list] = entries;
  for (uint i = first; i < entries; i += stride) list[own_list + 1 + i] = i;
}
// Only steps whose units are entries have a gate.
void renew_local() {
  const uint local = own_list + 1 + list[own_list] - step.n_local;
  for (uint i = thread_in_order(); i < step.n_local; i += kThreads) list[local + i] = middle.end + i;
}
// Writes a unit of the middle from list[to] on. The unit is whole: the last one, which may be short, is after
// the middle.
void list_unit(uint to, uint unit) {
  if (kPage == 1)
    list[to] = unit;
  else
    for (uint e = 0; e < kPage; ++e) list[to + e] = unit * kPage + e;
}

// ---- functions that all threads of a workgroup call together ----
//
// Loops continue as long as any thread of a subgroup has work, because subgroup operations follow them.

const uint kLoads = 8;  // per thread, in flight at once: one after the other they would dominate the time

// Keys from index i on, `stride` apart; beyond the range, the last key of the range.
void load_keys(Range range, uint i, uint stride, out uint keys[kLoads]) {
  [[unroll]] for (uint j = 0; j < kLoads; ++j) keys[j] = key_at(min(i + j * stride, range.end - 1));
}

const uint kBins = kListBins;
shared uint histogram[kBins];

void clear_histogram() {
  barrier();
  for (uint bin = thread_in_order(); bin < kBins; bin += kThreads) histogram[bin] = 0;
  barrier();
}

struct Bin {
  uint bin;
  uint wanted;  // how many of its keys are picked
  uint count;   // number of keys
};
shared Bin found_bin;

// The bin of the wanted-th largest key, from a complete histogram. There are at least `wanted` keys.
Bin find_bin(uint wanted) {
  // Bins descend with threads
  const uint kEach = kBins / kThreads, top = kBins - 1 - thread_in_order() * kEach;
  uint own = 0;
  for (uint i = 0; i < kEach; ++i) own += histogram[top - i];
  uint above = scan_threads(own).x;  // keys in larger bins
  if (above < wanted && wanted <= above + own)
    for (uint i = 0; i < kEach; ++i) {
      const uint count = histogram[top - i];
      if (wanted <= above + count) {
        found_bin = Bin(top - i, wanted - above, count);
        break;
      }
      above += count;
    }
  barrier();
  return found_bin;
}

// The smallest and the largest of the threads' keys.
shared uint smallest, largest;
uvec2 smallest_and_largest(uint low, uint high) {
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
  return uvec2(smallest, largest);
}

// Counts the keys of a range that are in [low, low + width], in bins of 2^bin_shift(width, kBins).
void count_keys(Range range, uint low, uint width) {
  const uint shift = bin_shift(width, kBins);
  clear_histogram();
  for (uint first = range.begin; first < range.end; first += kLoads * kThreads) {
    const uint i = first + thread_in_order();
    uint keys[kLoads];
    load_keys(range, i, kThreads, keys);
    [[unroll]] for (uint j = 0; j < kLoads; ++j) {
      const uint above = keys[j] - low;  // wraps to a large number if the key is below
      if (i + j * kThreads < range.end && above <= width) atomicAdd(histogram[above >> shift], 1);
    }
  }
  barrier();
}

shared uint found_index;

// The index of the wanted-th key equal to `bits`, counted from the end of the range.
uint tie_from_end(uint bits, Range range, uint wanted) {
  const Range own = part_of(range, gl_SubgroupID, gl_NumSubgroups);
  uint ties = 0;
  for (uint first = own.begin; first < own.end; first += kLoads * gl_SubgroupSize) {
    const uint i = first + gl_SubgroupInvocationID;
    uint keys[kLoads];
    load_keys(own, i, gl_SubgroupSize, keys);
    [[unroll]] for (uint j = 0; j < kLoads; ++j) ties += keys[j] == bits && i + j * gl_SubgroupSize < own.end ? 1 : 0;
  }
  ties = subgroupAdd(ties);
  const uvec2 sums = scan_subgroups(ties);
  uint left = wanted - (sums.y - sums.x - ties);  // wraps in subgroups below the one that has it
  if (left > 0 && left <= ties)
    for (uint tile = (own.end - own.begin + gl_SubgroupSize - 1) / gl_SubgroupSize; tile-- > 0;) {
      const uint i = own.begin + tile * gl_SubgroupSize + gl_SubgroupInvocationID;
      const bool equal = i < own.end && key_at(i) == bits;
      const uvec4 all = subgroupBallot(equal);
      const uint count = subgroupBallotBitCount(all);
      if (left <= count) {
        if (equal && count - subgroupBallotExclusiveBitCount(all) == left) found_index = i;
        break;
      }
      left -= count;
    }
  barrier();
  return found_index;
}

// Which of the units from i on, a subgroup's size apart, are picked.
void load_picked(Range range, uint i, Lowest lowest, out bool picked[kLoads]) {
  [[unroll]] for (uint j = 0; j < kLoads; ++j) picked[j] = is_picked(min(i + j * gl_SubgroupSize, range.end - 1), lowest);
  [[unroll]] for (uint j = 0; j < kLoads; ++j) picked[j] = picked[j] && i + j * gl_SubgroupSize < range.end;
}
// How many units of a range are picked, in the subgroups before this one and in total.
uvec2 count_picked(Range range, Lowest lowest) {
  const Range own = part_of(range, gl_SubgroupID, gl_NumSubgroups);
  uint count = 0;
  for (uint first = own.begin; first < own.end; first += kLoads * gl_SubgroupSize) {
    bool picked[kLoads];
    load_picked(own, first + gl_SubgroupInvocationID, lowest, picked);
    [[unroll]] for (uint j = 0; j < kLoads; ++j) count += picked[j] ? 1 : 0;
  }
  return scan_subgroups(subgroupAdd(count));
}
// Writes the picked units; `to` is where this subgroup's first one goes.
void write_picked(Range range, Lowest lowest, uint to) {
  const Range own = part_of(range, gl_SubgroupID, gl_NumSubgroups);
  for (uint first = own.begin; first < own.end; first += kLoads * gl_SubgroupSize) {
    const uint i = first + gl_SubgroupInvocationID;
    bool picked[kLoads];
    load_picked(own, i, lowest, picked);
    [[unroll]] for (uint j = 0; j < kLoads; ++j) {
      const uvec4 all = subgroupBallot(picked[j]);
      if (picked[j]) list_unit(to + subgroupBallotExclusiveBitCount(all) * kPage, i + j * gl_SubgroupSize);
      to += subgroupBallotBitCount(all) * kPage;
    }
  }
}
// Writes the entries that are listed regardless of their score, around `picked` units of the middle, and the
// count.
void list_ends(uint picked) {
  const uint before = (middle.begin + picked) * kPage, end = middle.end * kPage;
  if (thread_in_order() == 0) list[own_list] = before + entries - end;
  for (uint i = thread_in_order(); i < middle.begin * kPage; i += kThreads) list[own_list + 1 + i] = i;
  for (uint i = thread_in_order(); i < entries - end; i += kThreads) list[own_list + 1 + before + i] = end + i;
}
// Writes a part of the middle; `before` units are picked before it. `ends`: also writes the entries after the
// middle.
void write_part(Range own, Lowest lowest, uint before, bool ends) {
  const uvec2 picked = count_picked(own, lowest);
  write_picked(own, lowest, own_list + 1 + (middle.begin + before + picked.x) * kPage);
  if (ends) list_ends(before + picked.y);
}
