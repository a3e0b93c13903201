// kv_spill: copies the entries that a compaction is going to drop. A workgroup finds a few of them at a time and
// copies their rows: as they are, as floats (NUMBERS), or from f16 to blocks (ENCODES).
#version 450
#extension GL_GOOGLE_include_directive : require
#define KV_FORMAT_ID 2  // of the rows that NUMBERS reads and ENCODES writes
#include "../kv_format.glsl"
#include "../step.glsl"

const uint kThreads = 128, kRows = 32;  // kRows: entries that a workgroup takes at a time
layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kHasChunk = false;
layout(constant_id = 1) const bool kCounts = false;

layout(set = 0, binding = 1, std430) readonly buffer List { uint list[]; };
layout(set = 0, binding = 2, std430) readonly buffer Pool { uint pool[]; };  // the runs of the window
// From first_head on; so are the copies
layout(set = 0, binding = 3, std430) readonly buffer Chunk { uint chunk[]; };
layout(set = 0, binding = 4, std430) writeonly buffer Copies { uint copies[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Counts { uint counts[]; };  // kCounts
layout(push_constant) uniform Push {
  KvSpillParams p;
  RunWindow window;
  uint words;  // per row of pool and chunk
  uint base[5];
} push;
#define kHeadDim push.p.head_dim

shared uint found[kRows];

// The entries that the list of a head lacks: the i-th comes after i others and `low` listed ones.
uint unlisted(uint head, uint i) {
  const uint first = push.base[0] + head * push.p.list_capacity + 1;
  uint low = 0, high = list[first - 1];
  while (low < high) {
    const uint middle = (low + high) / 2;
    if (list[first + middle] - middle > i)
      high = middle;
    else
      low = middle + 1;
  }
  return i + low;
}

// Where an entry's row is: its first word in the pool or in the chunk.
struct Place {
  bool pooled;
  uint word;
};
Place place_of(HeadState own, uint entry) {
  const bool pooled = !kHasChunk || entry < own.n_entries;
  const uint row = pooled ? run_start(own, push.window) + entry
                          : gl_WorkGroupID.y * push.p.chunk_capacity + entry - own.n_entries;
  return Place(pooled, (pooled ? push.base[1] : push.base[2]) + row * push.words);
}
uint word_at(Place at, uint i) { return at.pooled ? pool[at.word + i] : chunk[at.word + i]; }

// Functions that copy the rows of found[0 .. rows) to copies from `to` on, a row of this kind. All threads
// call them.
#if defined(NUMBERS)

#ifdef BLOCKS
KV_READER(pool_row, pool, kKvFormat)
KV_READER(chunk_row, chunk, kKvFormat)
float channel(Place at, uint c) {
  return at.pooled ? pool_row_channel(at.word, c) : chunk_row_channel(at.word, c);
}
#else
float channel(Place at, uint c) { return kv_channel(word_at(at, c / 2), c); }
#endif
void copy_rows(HeadState own, uint to, uint rows) {
  for (uint i = gl_LocalInvocationIndex; i < rows * kHeadDim; i += kThreads)
    copies[push.base[3] + to * kHeadDim + i] =
        floatBitsToUint(channel(place_of(own, found[i / kHeadDim]), i % kHeadDim));
}

#elif defined(ENCODES)

#include "../kv_encode.glsl"
KV_WRITER(write_row, copies, kKvFormat)

// Eight threads have two blocks.
void copy_rows(HeadState own, uint to, uint rows) {
  const uint spans = (kHeadDim / kBlock + 1) / 2, items = rows * spans * 8;
  for (uint begin = 0; begin < items; begin += kThreads) {
    const uint i = begin + gl_LocalInvocationIndex, row = i / (spans * 8), c = i % (spans * 8) * kEach;
    const bool there = i < items && c < kHeadDim;
    [[unroll]] for (uint e = 0; e < kEach; ++e) x[e] = 0;
    if (there) {
      const Place at = place_of(own, found[row]);
      [[unroll]] for (uint e = 0; e < kEach; e += 2) {
        const vec2 two = unpackHalf2x16(word_at(at, (c + e) / 2));
        x[e] = two.x;
        x[e + 1] = two.y;
      }
    }
    uvec2 codes;
    uint scales;
    encode(kKvFormat, codes, scales);
    if (there) write_row(push.base[3] + (to + row) * KV_ROW_WORDS(kHeadDim), c, codes, scales);
  }
}

#else

void copy_rows(HeadState own, uint to, uint rows) {
  for (uint i = gl_LocalInvocationIndex; i < rows * push.words; i += kThreads)
    copies[push.base[3] + to * push.words + i] =
        word_at(place_of(own, found[i / push.words]), i % push.words);
}

#endif

void main() {
  const uint head = push.p.first_head + gl_WorkGroupID.y, thread = gl_LocalInvocationIndex;
  const HeadState own = head_states[push.p.head_state + head];
  if (!is_in(own, push.window)) return;
  const uint count = step_entries(step, own) - list[push.base[0] + head * push.p.list_capacity];
  for (uint first = gl_WorkGroupID.x * kRows; first < count; first += gl_NumWorkGroups.x * kRows) {
    const uint rows = min(kRows, count - first);
    barrier();  // the last ones have been copied
    if (thread < rows) found[thread] = unlisted(head, first + thread);
    barrier();
    copy_rows(own, gl_WorkGroupID.y * push.p.spill_capacity + first, rows);
  }
  if (!kCounts || gl_WorkGroupID.x > 0 || thread > 0) return;
  counts[push.base[4] + 1 + head] = count;
  if (gl_WorkGroupID.y == 0) counts[push.base[4]] = 1 + push.p.head_state;
}
