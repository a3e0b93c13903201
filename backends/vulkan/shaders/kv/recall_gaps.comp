// kv_recall: moves the entries of runs up, so that there are gaps for the rows.
//
// A workgroup moves a few words of every row of a head. The last entries move first, tile by tile. None moves to
// below its tile, so a tile may be written once it was read.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint kWidth = 8;  // words of a row per workgroup; divides the number of threads

layout(set = 0, binding = 1, std430) readonly buffer Lists { uint lists[]; };
layout(set = 0, binding = 2, std430) readonly buffer Count { uint row_counts[]; };
layout(set = 0, binding = 3, std430) readonly buffer Before { uint before[]; };  // recall_places
layout(set = 0, binding = 4, std430) buffer Run { uint run[]; };                 // the runs of the window
layout(push_constant) uniform Push {
  KvRecallParams p;
  RunWindow window;
  uint words;  // per row
  uint base[4];
} push;

// The new index of entry i: it goes after the rows that precede it.
uint place_of(uint first, uint i, uint rows) {
  uint low = 0, high = rows;
  while (low < high) {
    const uint middle = (low + high) / 2;
    if (before[first + middle] <= i)
      low = middle + 1;
    else
      high = middle;
  }
  return i + low;
}

void main() {
  const uint kLoads = 8;  // loads per thread in flight at once
  const uint head = push.p.first_head + gl_WorkGroupID.y;
  const HeadState own = head_states[push.p.head_state + head];
  if (!is_in(own, push.window)) return;
  const uint rows = row_counts[push.base[1] + head];
  if (rows == 0) return;
  const uint row = gl_LocalInvocationIndex / kWidth, at_once = gl_WorkGroupSize.x / kWidth;
  const uint word = gl_WorkGroupID.x * kWidth + gl_LocalInvocationIndex % kWidth;
  const uint first = push.base[3] + run_start(own, push.window) * push.words + word;
  const uint gaps = push.base[2] + own.first, in_place = before[gaps];
  uint end = lists[push.base[0] + head * push.p.list_capacity];
  while (end > in_place) {
    const uint tile = end - min(end - in_place, kLoads * at_once);
    uint loaded[kLoads];
    for (uint j = 0; j < kLoads; ++j) {
      const uint i = tile + row + j * at_once;
      if (i < end && word < push.words) loaded[j] = run[first + i * push.words];
    }
    memoryBarrierBuffer();
    barrier();  // this tile has been read
    for (uint j = 0; j < kLoads; ++j) {
      const uint i = tile + row + j * at_once;
      if (i < end && word < push.words) run[first + place_of(gaps, i, rows) * push.words] = loaded[j];
    }
    end = tile;
  }
}
