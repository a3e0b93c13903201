// vote: combines the heads' scores into one vote an entry (group) or a position (layer), in the log domain.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "log_sum.glsl"
#include "step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kHasGate = false;
layout(constant_id = 1) const bool kCounts = false;  // for a max-pool over a layer's votes

layout(set = 0, binding = 1, std430) readonly buffer Scores { float scores[]; };
layout(set = 0, binding = 2, std430) readonly buffer Lse { float lse[]; };
layout(set = 0, binding = 3, std430) readonly buffer Pos { int pos[]; };
layout(set = 0, binding = 4, std430) readonly buffer Gate { uint gate[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Votes { uint votes[]; };
layout(set = 0, binding = 6, std430) writeonly buffer Counts { uint counts[]; };  // of votes in each tile of positions
layout(push_constant) uniform Push {
  VoteParams p;
  uint base[6];
} push;

const uint kTile = 128;  // entries or positions of a workgroup
shared uint tile_count;

// Adds what a KV head's query heads say about an entry.
void add_group(uint head, uint entry, inout LogSum vote) {
  for (uint query = head * push.p.group; query < (head + 1) * push.p.group; ++query)
    vote = added(vote, scores[push.base[0] + query * push.p.score_capacity + entry] - lse[push.base[1] + query]);
}

void group_vote() {
  const uint n = step_entries(), tiles = (n + kTile - 1) / kTile;
  for (uint item = gl_WorkGroupID.x; item < push.p.heads * tiles; item += gl_NumWorkGroups.x) {
    const uint head = item / tiles, entry = item % tiles * kTile + gl_LocalInvocationIndex;
    if (entry >= n) continue;
    LogSum vote = kNoSum;
    if (entry >= step.n_init && entry < middle_end()) add_group(head, entry, vote);
    votes[push.base[4] + head * push.p.vote_capacity + entry] = log_sum_bits(vote);
  }
}

// So many KV heads at a time look for the entries that hold the tile's positions, with 16 threads each.
const uint kHeads = 8, kSearchers = kTile / kHeads, kNobody = 0xffffffff;
shared uint firsts[kHeads], passed[kHeads];
shared uint holders[kHeads][kTile];

// The entries of [n_init, middle_end()) that hold the positions [first, first + kTile) in the heads [head0, head0 + kHeads).
void find_holders(uint head0, int first) {
  const uint thread = gl_LocalInvocationIndex, own = thread / kSearchers, searcher = thread % kSearchers;
  const uint end = middle_end();
  const bool exists = head0 + own < push.p.heads;
  const uint at = push.base[2] + (head0 + own) * push.p.capacity;
  barrier();
  if (searcher == 0) firsts[own] = step.n_init;
  for (uint h = 0; h < kHeads; ++h) holders[h][thread] = kNobody;
  // The first entry with such a position lies in [firsts[h], firsts[h] + span], the same span for all heads.
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
    const uint place = uint(pos[push.base[2] + (head0 + h) * push.p.capacity + entry] - first);
    if (place < kTile) holders[h][place] = entry;
  }
  barrier();
}

void layer_vote() {
  const uint positions = uint(step.position) + step.n_rows, thread = gl_LocalInvocationIndex;
  for (uint first = gl_WorkGroupID.x * kTile; first < positions; first += gl_NumWorkGroups.x * kTile) {
    LogSum vote = kNoSum;
    for (uint head0 = 0; head0 < push.p.heads; head0 += kHeads) {
      find_holders(head0, int(first));
      for (uint h = 0; h < kHeads; ++h)
        if (holders[h][thread] != kNobody) add_group(head0 + h, holders[h][thread], vote);
    }
    const uint bits = log_sum_bits(vote);
    if (first + thread < positions) votes[push.base[4] + first + thread] = bits;
    if (!kCounts) continue;
    if (thread == 0) tile_count = 0;
    barrier();
    if (bits != kMinusInfinity) atomicAdd(tile_count, 1);
    barrier();
    if (thread == 0) counts[push.base[5] + first / kTile] = tile_count;
  }
}

void main() {
  if (!selects() || (kHasGate && gate[push.base[3]] != 0)) return;
  if (step.vote_scope == kVoteGroup)
    group_vote();
  else
    layer_vote();
}
