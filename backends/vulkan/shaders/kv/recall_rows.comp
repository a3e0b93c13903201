// kv_recall: puts rows into the gaps of runs, as they are or from blocks to f16 (BLOCKS).
#version 450
#extension GL_GOOGLE_include_directive : require
#define KV_FORMAT_ID 2  // of the rows
#include "../kv_format.glsl"
#include "../step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kAreScores = false;  // scores have no rows to copy: each becomes -inf
layout(constant_id = 1) const uint kHeadDim = 128;      // of blocks

layout(set = 0, binding = 1, std430) readonly buffer Count { uint row_counts[]; };
layout(set = 0, binding = 2, std430) readonly buffer Before { uint before[]; };  // recall_places
layout(set = 0, binding = 3, std430) readonly buffer Rows { uint rows[]; };      // from first_head on
layout(set = 0, binding = 4, std430) writeonly buffer Run { uint run[]; };       // the runs of the window
layout(push_constant) uniform Push {
  KvRecallParams p;
  RunWindow window;
  uint words;  // per row of the run
  uint base[4];
} push;

// The first word of row i in its run.
uint place_of(HeadState own, uint i) {
  const uint entry = before[push.base[1] + own.first + i] + i;
  return push.base[3] + (run_start(own, push.window) + entry) * push.words;
}
uint rows_of_head() { return gl_WorkGroupID.y * push.p.row_capacity; }

// The workgroup puts the rows [first, first + count), at most kRows of them.
#ifdef BLOCKS

const uint kRows = 8;
shared uint room[kRows * kHeadDim / 2];  // a row of blocks is shorter than one of f16
KV_READER(row, room, kKvFormat)

// Blocks may go a little beyond f16's range. NaN stays.
float bounded(float x) { return x > kLargestHalf ? kLargestHalf : x < -kLargestHalf ? -kLargestHalf : x; }
uint in_halves(float low, float high) { return pack_halves(bounded(low), bounded(high)); }
void put_rows(HeadState own, uint first, uint count) {
  const uint words = KV_ROW_WORDS(kHeadDim), from = push.base[2] + (rows_of_head() + first) * words;
  barrier();  // the last rows have been put
  for (uint i = gl_LocalInvocationIndex; i < count * words; i += gl_WorkGroupSize.x) room[i] = rows[from + i];
  barrier();
  for (uint i = gl_LocalInvocationIndex; i < count * (kHeadDim / 8); i += gl_WorkGroupSize.x) {
    const uint row = i / (kHeadDim / 8), c = i % (kHeadDim / 8) * 8, to = place_of(own, first + row) + c / 2;
    vec4 low, high;
    row_eight(row * words, c, low, high);
    run[to] = in_halves(low.x, low.y);
    run[to + 1] = in_halves(low.z, low.w);
    run[to + 2] = in_halves(high.x, high.y);
    run[to + 3] = in_halves(high.z, high.w);
  }
}

#else

const uint kRows = 32, kLowestScore = 0xff800000;  // kLowestScore: -inf
void put_rows(HeadState own, uint first, uint count) {
  const uint from = push.base[2] + (rows_of_head() + first) * push.words;
  for (uint i = gl_LocalInvocationIndex; i < count * push.words; i += gl_WorkGroupSize.x)
    run[place_of(own, first + i / push.words) + i % push.words] = kAreScores ? kLowestScore : rows[from + i];
}

#endif

void main() {
  const uint head = push.p.first_head + gl_WorkGroupID.y;
  const HeadState own = head_states[push.p.head_state + head];
  if (!is_in(own, push.window)) return;
  const uint count = row_counts[push.base[0] + head];
  for (uint first = gl_WorkGroupID.x * kRows; first < count; first += gl_NumWorkGroups.x * kRows)
    put_rows(own, first, min(kRows, count - first));
}
