// scatter_add: adds the values of heads to positions. A workgroup owns a range of positions and goes through
// the heads, so every sum is made in the same order.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

// Positions per workgroup, one per thread: a head adds to them at most this many entries
const uint kSlots = 128;
const uint kHeads = 32;   // heads whose ranges are searched at a time
layout(local_size_x = kSlots) in;
layout(constant_id = 0) const bool kHasList = false;
layout(constant_id = 1) const bool kHasWeights = false;

layout(set = 0, binding = 1, std430) readonly buffer Pos { int pos[]; };
layout(set = 0, binding = 2, std430) readonly buffer Weights { float weights[]; };
layout(set = 0, binding = 3, std430) readonly buffer List { uint list[]; };
layout(set = 0, binding = 4, std430) buffer Sums { float sums[]; };
layout(push_constant) uniform Push {
  ScatterAddParams p;
  uint base[4];
} push;
#define LIST_BASE push.base[2]
#define LIST_CAPACITY push.p.list_capacity
#include "../list.glsl"

shared uint begins[kHeads];
shared float own[kSlots];

HeadState state_of(uint head) { return head_states[push.p.head_state + head]; }
int position(HeadState state, uint head, uint n) {
  return pos[push.base[0] + state.first + list_entry(head, n)];
}

// The first index whose position is at least `first`.
uint lower_bound(uint head, int first) {
  const HeadState state = state_of(head);
  uint end = list_count(head, state.n_entries), begin = window_begin(push.p.window, end);
  while (begin < end) {
    const uint middle = begin + (end - begin) / 2;
    if (position(state, head, middle) < first)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// Adds the values of a head to the positions from `first` on.
void add_head(uint head, uint begin, int first) {
  const HeadState state = state_of(head);
  const uint n = begin + gl_LocalInvocationIndex;
  if (n >= list_count(head, state.n_entries)) return;
  const uint slot = uint(position(state, head, n) - first);
  if (slot >= kSlots) return;
  if (kHasWeights)
    own[slot] += weights[push.base[1] + state.first + n];
  else
    own[slot] += 1;
}

void sum_block(uint block) {
  const uint thread = gl_LocalInvocationIndex, slot = block * kSlots + thread;
  const int first = step.position + int(block * kSlots);
  own[thread] = push.p.add != 0 && slot < push.p.slots ? sums[push.base[3] + slot] : 0;
  for (uint done = 0; done < push.p.heads; done += kHeads) {
    const uint count = min(push.p.heads - done, kHeads), base = push.p.first_head + done;
    if (thread < count) begins[thread] = lower_bound(base + thread, first);
    barrier();
    for (uint h = 0; h < count; ++h) {
      add_head(base + h, begins[h], first);
      barrier();
    }
  }
  if (slot < push.p.slots) sums[push.base[3] + slot] = own[thread];
  barrier();
}

void main() {
  for (uint block = gl_WorkGroupID.x; block * kSlots < push.p.slots; block += gl_NumWorkGroups.x) sum_block(block);
}
