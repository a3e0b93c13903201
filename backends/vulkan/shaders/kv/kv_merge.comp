// kv_merge: sorts a run by position. Its last entries, the tail, were appended out of order.
//
// A workgroup moves a few words of every row of a head. Entries before the tail move up, the last ones first,
// tile by tile. None moves to below its tile, so a tile may be written once it was read.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint kWidth = 8;  // words of a row per workgroup; divides the number of threads
layout(constant_id = 2) const bool kOfPositions = false;  // the positions themselves are merged

// The positions of the layer; unused if kOfPositions
layout(set = 0, binding = 1, std430) readonly buffer Pos { int pos[]; };
layout(set = 0, binding = 2, std430) buffer Run { uint run[]; };           // the runs of the window
layout(push_constant) uniform Push {
  KvMergeParams p;
  RunWindow window;
  uint words;  // per row
  uint base[2];
} push;

shared uint tail_begin;
// For each entry of the tail: how many entries stay before it; ascending
shared uint before[kMostMergedRows];
shared uint tail[kMostMergedRows * kWidth];

int position(HeadState own, uint i) {
  return kOfPositions ? int(run[push.base[1] + run_start(own, push.window) + i]) : pos[push.base[0] + own.first + i];
}

// Index of the first of n ascending positions that is not less than `of`.
uint lower_bound(HeadState own, uint n, int of) {
  uint low = 0;
  while (low < n) {
    const uint middle = (low + n) / 2;
    if (position(own, middle) < of)
      low = middle + 1;
    else
      n = middle;
  }
  return low;
}

// The new index of entry i, which is before the tail of `count` entries: it goes after those of the tail that
// precede it.
uint place_of(uint i, uint count) {
  uint low = 0, high = count;
  while (low < high) {
    const uint middle = (low + high) / 2;
    if (before[middle] <= i)
      low = middle + 1;
    else
      high = middle;
  }
  return i + low;
}

// Where the tail begins; n if positions ascend, which they nearly always do.
uint find_tail(HeadState own, uint n) {
  const uint thread = gl_LocalInvocationIndex;
  if (thread == 0) tail_begin = n;
  barrier();
  for (uint i = max(n - min(n, step.n_rows), 1) + thread; i < n; i += gl_WorkGroupSize.x)
    if (position(own, i) < position(own, i - 1)) tail_begin = i;
  barrier();
  const uint begin = tail_begin;
  for (uint i = begin + thread; i < n; i += gl_WorkGroupSize.x)
    before[i - begin] = lower_bound(own, begin, position(own, i));
  barrier();
  return begin;
}

void main() {
  const uint kLoads = 8;  // loads per thread in flight at once
  const HeadState own = head_states[push.p.head_state + push.p.first_head + gl_WorkGroupID.y];
  if (!is_in(own, push.window)) return;
  const uint n = min(own.keep, step_entries(step, own)), begin = find_tail(own, n), count = n - begin;
  if (count == 0) return;

  const uint in_slice = gl_LocalInvocationIndex % kWidth, row = gl_LocalInvocationIndex / kWidth;
  const uint word = gl_WorkGroupID.x * kWidth + in_slice, rows = gl_WorkGroupSize.x / kWidth;
  const uint own_run = push.base[1] + run_start(own, push.window) * push.words + word;
  const bool has_word = word < push.words;
  for (uint j = row; j < count && has_word; j += rows) tail[j * kWidth + in_slice] = run[own_run + (begin + j) * push.words];
  const uint in_place = before[0];
  uint end = begin;
  while (end > in_place) {
    const uint tile = end - min(end - in_place, kLoads * rows);
    uint loaded[kLoads];
    for (uint j = 0; j < kLoads; ++j) {
      const uint i = tile + row + j * rows;
      if (i < end && has_word) loaded[j] = run[own_run + i * push.words];
    }
    memoryBarrierBuffer();
    barrier();  // the tail and this tile have been read
    for (uint j = 0; j < kLoads; ++j) {
      const uint i = tile + row + j * rows;
      if (i < end && has_word) run[own_run + place_of(i, count) * push.words] = loaded[j];
    }
    end = tile;
  }
  for (uint j = row; j < count && has_word; j += rows) run[own_run + (before[j] + j) * push.words] = tail[j * kWidth + in_slice];
}
