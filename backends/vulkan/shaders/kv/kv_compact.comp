// kv_compact: keeps the listed entries of pool and chunk, in place.
//
// Columns of the pool are independent. A workgroup moves a few words of every row of a head, those of one
// column. Entries ascend, so row i comes from row i or a later one. The sources of a tile are in none of the
// tiles before it, so a tile may be written once all of it was read.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint kWidth = 8;  // words of a row per workgroup; divides the number of threads
layout(constant_id = 2) const bool kHasList = false;
layout(constant_id = 3) const bool kHasChunk = false;

layout(set = 0, binding = 1, std430) readonly buffer List { uint list[]; };
layout(set = 0, binding = 2, std430) readonly buffer Chunk { uint chunk[]; };  // from first_head on
layout(set = 0, binding = 3, std430) buffer Pool { uint pool[]; };              // the runs of the window
layout(push_constant) uniform Push {
  KvCompactParams p;
  RunWindow window;
  uint words;  // per row
  uint base[3];
} push;

#define LIST_BASE push.base[0]
#define LIST_CAPACITY push.p.list_capacity
#include "../list.glsl"

shared uint in_place;

// The first list index whose entry is not in its place, found by searching as many parts at a time as there
// are threads.
uint first_moved(uint head, uint count, uint pooled) {
  uint begin = 0, end = min(count, pooled);  // the result is in [begin, end]
  if (!kHasList) return end;
  while (begin < end) {
    barrier();
    if (gl_LocalInvocationIndex == 0) in_place = 0;
    barrier();
    const uint part = (end - begin + gl_WorkGroupSize.x - 1) / gl_WorkGroupSize.x;
    const uint i = begin + gl_LocalInvocationIndex * part;
    if (i < end && list_entry(head, i) == i) atomicAdd(in_place, 1);  // list[i] - i never falls
    barrier();
    if (in_place == 0) return begin;
    end = min(end, begin + in_place * part);
    begin += (in_place - 1) * part + 1;
  }
  return begin;
}

void main() {
  const uint kLoads = 8;  // loads per thread in flight at once
  const uint head = push.p.first_head + gl_WorkGroupID.y;
  const HeadState own = head_states[push.p.head_state + head];
  if (!is_in(own, push.window)) return;
  const uint count = list_count(head, step_entries(step, own)), pooled = kHasChunk ? own.n_entries : ~0u;
  const uint word = gl_WorkGroupID.x * kWidth + gl_LocalInvocationIndex % kWidth, row = gl_LocalInvocationIndex / kWidth;
  const uint rows = gl_WorkGroupSize.x / kWidth;
  const uint to = push.base[2] + run_start(own, push.window) * push.words + word;
  const uint from_chunk = push.base[1] + gl_WorkGroupID.y * push.p.chunk_capacity * push.words + word;
  for (uint tile = first_moved(head, count, pooled); tile < count; tile += kLoads * rows) {
    uint loaded[kLoads];
    for (uint j = 0; j < kLoads; ++j) {
      const uint i = tile + row + j * rows;
      if (i >= count || word >= push.words) continue;
      const uint entry = list_entry(head, i);
      loaded[j] = entry < pooled ? pool[to + entry * push.words]
                                 : chunk[from_chunk + (entry - pooled) * push.words];
    }
    memoryBarrierBuffer();
    barrier();
    for (uint j = 0; j < kLoads; ++j) {
      const uint i = tile + row + j * rows;
      if (i < count && word < push.words) pool[to + i * push.words] = loaded[j];
    }
  }
}
