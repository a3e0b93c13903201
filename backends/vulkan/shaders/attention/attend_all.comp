// attend_all: attention to a run, the step's rows and the pages of a store. The result of a softmax does not
// depend on the order of entries except for rounding, so a workgroup takes a part of the tiles of the run and of
// the pages. It finds where each entry is among all others, because keys rotate to their places. A tile has at
// most as many entries as a page.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#define KV_FORMAT_ID 2
#define KV_VALUE_FORMAT_ID 3
#include "../kv_format.glsl"
#include "../log_sum.glsl"
#include "../soft_cap.glsl"
#include "../step.glsl"
#include "attend_all_params.h"

const uint kThreads = 128;
layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kHeadDim = 128;
layout(constant_id = 1) const bool kHasChunk = false;
layout(constant_id = 4) const uint kStoredKeys = 0;  // formats
layout(constant_id = 5) const uint kStoredValues = 0;

layout(set = 0, binding = 1, std430) readonly buffer Queries { float queries[]; };  // attend_all_queries
layout(set = 0, binding = 2, std430) readonly buffer Table { uint table[]; };       // attend_all_pages
layout(set = 0, binding = 3, std430) readonly buffer Count { uint page_counts[]; };
layout(set = 0, binding = 4, std430) readonly buffer Pos { int pos[]; };
layout(set = 0, binding = 5, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 6, std430) readonly buffer RunK { uint run_k[]; };  // the runs of the window; so is run_v
layout(set = 0, binding = 7, std430) readonly buffer RunV { uint run_v[]; };
layout(set = 0, binding = 8, std430) readonly buffer ChunkK { uint chunk_k[]; };  // from first_head on; so are the others
layout(set = 0, binding = 9, std430) readonly buffer ChunkV { uint chunk_v[]; };
layout(set = 0, binding = 10, std430) readonly buffer StoredK { uint stored_k[]; };
layout(set = 0, binding = 11, std430) readonly buffer StoredV { uint stored_v[]; };
// [rows][query heads][parts]{peak, sum, dh}
layout(set = 0, binding = 12, std430) writeonly buffer Parts { float parts[]; };
layout(push_constant) uniform Push {
  AttendAllPartParams p;
  RunWindow window;
  uint base[12];
} push;
#define ROPE push.p.rope
#define ROPE_BASE push.base[4]
#include "../rope.glsl"

KV_READER(run_key, run_k, kKvFormat)
KV_READER(run_value, run_v, kValueFormat)
KV_READER(chunk_key, chunk_k, kKvFormat)
KV_READER(chunk_value, chunk_v, kValueFormat)
KV_READER(stored_key, stored_k, kStoredKeys)
KV_READER(stored_value, stored_v, kStoredValues)

const uint kColumns = (kHeadDim + kThreads - 1) / kThreads;  // of a thread
const uint kStride = kHeadDim + 1;                          // so that threads read different banks
const uint kInRun = 0, kInChunk = 1, kInStore = 2, kNowhere = 3;
shared float numbers[kAllEntries * kStride];  // keys, and then values
shared float weights[kAllVectors * kAllEntries];
shared float factors[kAllVectors];
// For each entry of a tile: the array that has its row, the index of the row there, its place among all entries,
// and the first row of the step that sees it.
shared uint arrays[kAllEntries], rows[kAllEntries], places[kAllEntries], seen_from[kAllEntries];

struct Head {
  uint head;  // of the layer
  HeadState state;
  uint in_run, entries, pages;  // entries: with the step's rows
  uint table;                   // its first word in the table
};

Head find_head() {
  Head h;
  h.head = push.p.first_head + gl_WorkGroupID.y;
  h.state = head_states[push.p.head_state + h.head];
  h.entries = step_entries(step, h.state);
  h.in_run = kHasChunk ? h.state.n_entries : h.entries;
  h.pages = page_counts[push.base[2] + h.head];
  h.table = push.base[1] + h.head * (push.p.page_capacity + 1) * 4;
  return h;
}

// The entries of the run before a position.
uint run_before(Head h, int position) {
  uint low = 0, high = h.in_run;
  while (low < high) {
    const uint middle = (low + high) / 2;
    if (pos[push.base[3] + h.state.first + middle] < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}
// The number of held positions of a page before one of them.
uint held_before(uint held, uint place) { return bitCount(held & (1u << place) - 1); }
// The entries of the store before a position.
uint stored_before(Head h, int position) {
  const uint number = uint(position) / kStoredPage;
  uint low = 0, high = h.pages;
  while (low < high) {
    const uint middle = (low + high) / 2;
    if (table[h.table + 4 * middle] < number)
      low = middle + 1;
    else
      high = middle;
  }
  const uint at = h.table + 4 * low, before = table[at + 3];
  return low < h.pages && table[at] == number ? before + held_before(table[at + 1], uint(position) % kStoredPage) : before;
}

// Finds the entries of a tile: a thread has one. `run_tiles` tiles come before the pages.
void find_entries(Head h, uint tile, uint run_tiles) {
  const uint i = gl_LocalInvocationIndex;
  arrays[i] = kNowhere;
  seen_from[i] = 0;
  if (tile < run_tiles) {
    const uint entry = tile * kAllEntries + i;
    if (entry >= h.entries) return;
    const bool in_run = entry < h.in_run;
    arrays[i] = in_run ? kInRun : kInChunk;
    rows[i] = in_run ? run_start(h.state, push.window) + entry
                     : gl_WorkGroupID.y * push.p.chunk_capacity + entry - h.in_run;
    places[i] = entry + (in_run ? stored_before(h, pos[push.base[3] + h.state.first + entry]) : table[h.table + 4 * h.pages + 3]);
    seen_from[i] = entry < h.state.n_entries ? 0 : entry - h.state.n_entries;
  } else {
    const uint page = h.table + 4 * (tile - run_tiles), held = table[page + 1];
    if ((held >> i & 1) == 0) return;
    arrays[i] = kInStore;
    rows[i] = table[page + 2];
    places[i] = table[page + 3] + held_before(held, i) + run_before(h, int(table[page] * kStoredPage + i));
  }
}

// Where a row of the store begins: so many words of rows of the same kind are before it in its page.
uint stored_row(uint slot, uint words_before) {
  const uint page = kStoredPage * (KV_WORDS(kStoredKeys, kHeadDim) + KV_WORDS(kStoredValues, kHeadDim));
  return gl_WorkGroupID.y * push.p.rows_stride * 16 + slot * page + words_before;
}

// Loads the keys or values of the tile.
void load_numbers(bool keys) {
  for (uint i = gl_LocalInvocationIndex; i < kAllEntries * (kHeadDim / 8); i += kThreads) {
    const uint entry = i / (kHeadDim / 8), c = i % (kHeadDim / 8) * 8, row = rows[entry], array = arrays[entry];
    vec4 low = vec4(0), high = vec4(0);
    if (array == kInRun && keys)
      run_key_eight(push.base[5] + row * KV_ROW_WORDS(kHeadDim), c, low, high);
    else if (array == kInRun)
      run_value_eight(push.base[6] + row * KV_WORDS(kValueFormat, kHeadDim), c, low, high);
    else if (array == kInChunk && keys)
      chunk_key_eight(push.base[7] + row * KV_ROW_WORDS(kHeadDim), c, low, high);
    else if (array == kInChunk)
      chunk_value_eight(push.base[8] + row * KV_WORDS(kValueFormat, kHeadDim), c, low, high);
    else if (array == kInStore && keys)
      stored_key_eight(push.base[9] + stored_row(row, entry * KV_WORDS(kStoredKeys, kHeadDim)), c, low, high);
    else if (array == kInStore)
      stored_value_eight(push.base[10] + stored_row(row, entry * KV_WORDS(kStoredValues, kHeadDim)), c, low, high);
    const uint to = entry * kStride + c;
    [[unroll]] for (uint e = 0; e < 4; ++e) {
      numbers[to + e] = low[e];
      numbers[to + 4 + e] = high[e];
    }
  }
}

// Rotates the keys to their places.
void rotate_keys() {
  for (uint i = gl_LocalInvocationIndex; i < kAllEntries * rope_pairs(); i += kThreads) {
    const uint entry = i / rope_pairs(), pair = i % rope_pairs();
    if (arrays[entry] == kNowhere) continue;
    const uvec2 c = entry * kStride + channels_of(pair);
    const vec2 x = rotated_pair(vec2(numbers[c.x], numbers[c.y]), rope_angle(places[entry], pair));
    numbers[c.x] = x.x;
    numbers[c.y] = x.y;
  }
}

// The scores of all vectors from `first` on and all entries; kNoPeak where a vector does not see the entry.
void score(uint first_query, uint first, uint vectors) {
  for (uint i = gl_LocalInvocationIndex; i < kAllVectors * kAllEntries; i += kThreads) {
    const uint vector = first + i / kAllEntries, entry = i % kAllEntries;
    float sum = kNoPeak;
    if (vector < vectors && arrays[entry] != kNowhere && seen_from[entry] <= vector / push.p.group) {
      const uint from = first_query + vector * kHeadDim;
      sum = 0;
      for (uint c = 0; c < kHeadDim; ++c) sum += queries[from + c] * numbers[entry * kStride + c];
      if (push.p.cap > 0) sum = soft_cap(sum, push.p.cap);
    }
    weights[i] = sum;
  }
}

// Turns the scores of a vector into weights, and adds them to its sum.
void soften(uint vector, inout LogSum sum) {
  float peak = sum.peak;
  for (uint i = 0; i < kAllEntries; ++i) peak = max(peak, weights[vector * kAllEntries + i]);
  factors[vector] = exp(sum.peak - peak);
  sum = LogSum(peak, sum.sum * factors[vector]);
  for (uint i = 0; i < kAllEntries; ++i) {
    const float x = weights[vector * kAllEntries + i], weight = x == kNoPeak ? 0 : exp(x - peak);
    weights[vector * kAllEntries + i] = weight;
    sum.sum += weight;
  }
}

void main() {
  bool works = push.p.if_stored == 0;
  for (uint head = 0; head < push.p.heads && !works; ++head) works = page_counts[push.base[2] + head] != 0;
  if (!works) return;
  const uint thread = gl_LocalInvocationIndex, vectors = step.n_rows * push.p.group;
  const uint first = (push.p.first_block + gl_WorkGroupID.z) * kAllVectors;
  const Head h = find_head();
  if (first >= vectors || !is_in(h.state, push.window)) return;
  const uint run_tiles = (h.entries + kAllEntries - 1) / kAllEntries, tiles = run_tiles + h.pages;
  const uint part = gl_WorkGroupID.x, n_parts = gl_NumWorkGroups.x;
  const uint first_query = push.base[0] + h.head * vectors * kHeadDim;
  float out_sums[kAllVectors * kColumns];
  [[unroll]] for (uint i = 0; i < kAllVectors * kColumns; ++i) out_sums[i] = 0;
  LogSum sum = kNoSum;  // of the thread's vector
  const uint each = (tiles + n_parts - 1) / n_parts;
  for (uint tile = part * each; tile < min((part + 1) * each, tiles); ++tile) {
    barrier();  // the last tile has been added
    if (thread < kAllEntries) find_entries(h, tile, run_tiles);
    barrier();
    load_numbers(true);
    barrier();
    if (ROPE.mode == kRopeList) rotate_keys();
    barrier();
    score(first_query, first, vectors);
    barrier();
    load_numbers(false);
    if (thread < kAllVectors) soften(thread, sum);
    barrier();
    [[unroll]] for (uint vector = 0; vector < kAllVectors; ++vector)
      [[unroll]] for (uint j = 0; j < kColumns; ++j) {
        const uint c = j * kThreads + thread;
        if (c >= kHeadDim) continue;
        float added = out_sums[vector * kColumns + j] * factors[vector];
        [[dont_unroll]] for (uint i = 0; i < kAllEntries; ++i) added += weights[vector * kAllEntries + i] * numbers[i * kStride + c];
        out_sums[vector * kColumns + j] = added;
      }
  }
  const uint queries_of_layer = push.p.heads * push.p.group;
  for (uint i = 0; i < kAllVectors && first + i < vectors; ++i) {
    const uint vector = first + i, row = vector / push.p.group, query = h.head * push.p.group + vector % push.p.group;
    const uint to = push.base[11] + ((row * queries_of_layer + query) * n_parts + part) * (kHeadDim + 2);
    if (thread == i) {
      parts[to] = sum.peak;
      parts[to + 1] = sum.sum;
    }
    [[unroll]] for (uint j = 0; j < kColumns; ++j) {
      const uint c = j * kThreads + thread;
      if (c < kHeadDim) parts[to + 2 + c] = out_sums[i * kColumns + j];
    }
  }
}
