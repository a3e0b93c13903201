// Shared by the voting shaders: what a head's queries contribute to an entry's vote, and which entry holds a
// position. The includer defines kTile (its number of threads) and the push constant with VoteParams p and
// the bases, and has declared `float lse[]`, binding 2.
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "../log_sum.glsl"

layout(set = 0, binding = 1, std430) readonly buffer Scores { float scores[]; };
layout(set = 0, binding = 3, std430) readonly buffer Pos { int pos[]; };
layout(set = 0, binding = 4, std430) readonly buffer Gate { uint gate[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Votes { uint votes[]; };

// Adds the contributions of `count` query heads for an entry or a page; eight are read at once.
void add_queries(uint first, uint count, uint unit, inout LogSum vote) {
  [[dont_unroll]] for (uint done = 0; done < count; done += 8) {
    vec4 said[2];
    [[unroll]] for (uint i = 0; i < 8; ++i) {
      const uint query = first + min(done + i, count - 1);
      said[i / 4][i % 4] = scores[push.base[0] + query * push.p.score_capacity + unit] - lse[push.base[1] + query];
    }
    [[unroll]] for (uint i = 0; i < 2; ++i)
      if (done + 4 * i < count) vote = added(vote, said[i], count - done - 4 * i);
  }
}
void add_group(uint head, uint unit, inout LogSum vote) { add_queries(head * push.p.group, push.p.group, unit, vote); }

// kHeads KV heads at a time are searched for the entries that hold the tile's positions; threads are divided
// among them.
const uint kHeads = kTile > 256 ? 4 : 8, kSearchers = kTile / kHeads, kNobody = 0xffffffff;
shared uint firsts[kHeads], passed[kHeads];
shared uint holders[kHeads][kTile];

uint run_begin(uint head) { return head_states[push.p.head_state + head].first; }
// The number of entries of each head; all runs are equally long.
uint entries_of_layer() { return step_entries(step, head_states[push.p.head_state]); }

// Finds the entries of the middle that hold positions [first, first + kTile) in heads [head0, head0 +
// kHeads).
void find_holders(uint head0, int first) {
  const uint thread = gl_LocalInvocationIndex, own = thread / kSearchers, searcher = thread % kSearchers;
  const uint end = middle_end(step, entries_of_layer());
  const bool exists = head0 + own < push.p.heads;
  const uint at = push.base[2] + (exists ? run_begin(head0 + own) : 0);
  barrier();
  if (searcher == 0) firsts[own] = step.n_init;
  for (uint h = 0; h < kHeads; ++h) holders[h][thread] = kNobody;
  // The first entry with such a position is in [firsts[h], firsts[h] + span]; all heads have the same span.
  for (uint span = end - step.n_init; span > 0;) {
    const uint part = span / (kSearchers + 1) + 1;
    if (searcher == 0) passed[own] = 0;
    barrier();
    const uint last = firsts[own] + (searcher + 1) * part - 1;
    if (exists && last < end && pos[at + last] < first) atomicAdd(passed[own], 1);
    barrier();
    if (searcher == 0) firsts[own] += passed[own] * part;
    span = part - 1;
  }
  barrier();
  for (uint h = 0; h < kHeads && head0 + h < push.p.heads; ++h) {
    const uint entry = firsts[h] + thread;
    if (entry >= end) continue;
    const uint place = uint(pos[push.base[2] + run_begin(head0 + h) + entry] - first);
    if (place < kTile) holders[h][place] = entry;
  }
  barrier();
}

// Whether all heads have every entry of the middle at its own position, as they do if nothing was evicted:
// positions ascend. One head per lane, so that all are loaded at once; whole subgroups call this.
bool are_entries_positions(uint end) {
  uint moved = 0;
  for (uint first = 0; first < push.p.heads; first += gl_SubgroupSize) {
    const uint head = min(first + gl_SubgroupInvocationID, push.p.heads - 1);
    if (pos[push.base[2] + run_begin(head) + end - 1] != int(end - 1)) moved = 1;
  }
  return subgroupMax(moved) == 0;
}

// The bits of a layer's vote for position `first` + gl_LocalInvocationIndex. All threads call this.
uint layer_vote(uint first) {
  LogSum vote = kNoSum;
  const uint end = middle_end(step, entries_of_layer());
  if (are_entries_positions(end)) {
    const uint entry = first + gl_LocalInvocationIndex;
    if (entry >= step.n_init && entry < end) add_queries(0, push.p.heads * push.p.group, entry, vote);
    return log_sum_bits(vote);
  }
  for (uint head0 = 0; head0 < push.p.heads; head0 += kHeads) {
    find_holders(head0, int(first));
    for (uint h = 0; h < kHeads; ++h) {
      const uint entry = holders[h][gl_LocalInvocationIndex];
      if (entry != kNobody) add_group(head0 + h, entry, vote);
    }
  }
  return log_sum_bits(vote);
}
