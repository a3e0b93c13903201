// attention of a single row to the pool; keys are gathered and rotated on the fly. A workgroup attends with
// the query heads of one KV head to a part of the list, tile by tile, and the last workgroup combines the
// parts.
//
// The time of a token goes into reads that depend on each other, and into loading code, most of which runs
// once, so both are kept small. Tile i belongs to part i % parts, so its entries can be requested before the
// number of entries is known, as if all heads had equally many.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#include "../../pool_parts.h"
#define KV_FORMAT_ID 11
#define KV_VALUE_FORMAT_ID 13
#include "../kv_format.glsl"
#include "../soft_cap.glsl"
#include "../step.glsl"

layout(local_size_x_id = 7) in;  // a multiple of kLanes
const uint kThreads = gl_WorkGroupSize.x;
layout(constant_id = 0) const uint kHeadDim = 128;
layout(constant_id = 1) const uint kHeads = 4;  // query heads per pass, at most kMostHeads
layout(constant_id = 2) const uint kMode = kRopeList;  // RopeParams
layout(constant_id = 3) const uint kPairing = kRopeHalves;
layout(constant_id = 4) const uint kRotating = 128;
layout(constant_id = 5) const bool kAligned = false;  // 8 channels rotate in the same way, and are two uvec2
// Parts have one tile, except those of heads that are longer than the others
layout(constant_id = 6) const bool kOnce = false;
layout(constant_id = 8) const uint kLanes = 32;       // lanes per subgroup
layout(constant_id = 9) const bool kEqualHeads = false;  // AttentionParams
layout(constant_id = 10) const bool kCaps = false;
layout(constant_id = 12) const uint kFirstValue = 0;  // channel of a row of v where the value begins

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer K { uint k[]; };  // the runs of the window; so is v
layout(set = 0, binding = 2, std430) readonly buffer K2 { uvec2 k2[]; };
layout(set = 0, binding = 3, std430) readonly buffer V { uint v[]; };
layout(set = 0, binding = 3, std430) readonly buffer V2 { uvec2 v2[]; };
layout(set = 0, binding = 4, std430) readonly buffer List { uint list[]; };
layout(set = 0, binding = 5, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 5, std430) readonly buffer Rope4 { vec4 rope_table4[]; };
// For each head [query heads][parts][quads of channels] before division by the sum, and [query
// heads][parts]{maximum, sum}; and one counter for each pass over a KV head's group.
layout(set = 0, binding = 6, std430) coherent buffer Outs { vec4 outs[]; };
layout(set = 0, binding = 7, std430) coherent buffer Stats { vec2 stats[]; };
layout(set = 0, binding = 8, std430) coherent buffer Counters { uint counters[]; };
layout(set = 0, binding = 9, std430) writeonly buffer Y { float y[]; };
#ifdef SINKS
layout(set = 0, binding = 10, std430) readonly buffer Sinks { float sinks[]; };  // one per query head
#endif
layout(push_constant) uniform Push {
  AttentionParams p;
  RunWindow window;
  uint base[10];
} push;

// Not a constant: windowed layers, which have no list, share this code with layers that have one, because a
// token's code must stay in the instruction caches (gpt-oss-20b after 32K tokens on an H200: 300.5 instead of
// 296.6 tokens/s).
#define kHasList (push.p.list_capacity != 0)
#define ROPE RopeParams(kMode, kPairing, kRotating, push.p.rope.query_weight)
#define ROPE_BASE push.base[4]
#include "../rope.glsl"
#define LIST_BASE push.base[3]
#define LIST_CAPACITY push.p.list_capacity
#include "../list.glsl"
#include "../lanes.glsl"
#include "../last_group.glsl"

const float kLog2E = 1.44269504;  // queries are scaled by it, so that the softmax works in base 2
const float kNoPeak = -3e38;      // below every score; finite, because not every device supports infinities
const bool kByList = kMode == kRopeList;

// A unit is four pairs of channels. For the scores, thread (place, side) handles units side, side + kSides,
// ... of keys place and place + kPlaces of a tile. A key rotates by its index in the tile, so a thread's
// angles stay the same, and the query rotates by the remaining difference.
const uint kWords = KV_ROW_WORDS(kHeadDim);  // per row
const uint kUnits = (kHeadDim + 7) / 8, kSides = 8;
#ifdef BLOCKS
// Two units at a time, because blocks are decoded eight channels at a time
const uint kUnitsEach = (kUnits + 2 * kSides - 1) / (2 * kSides) * 2, kValueWords = KV_WORDS(kValueFormat, kHeadDim);
uint unit_of(uint side, uint u) { return (side + kSides * (u / 2)) * 2 + u % 2; }
#else
const uint kUnitsEach = (kUnits + kSides - 1) / kSides;
#define kValueWords kWords
#define unit_of(side, u) (side + kSides * (u))
#endif
const uint kKeysEach = 2, kPlaces = kThreads / kSides, kTile = kKeysEach * kPlaces;
// For the softmax, a subgroup handles whole heads: gl_SubgroupID, and further ones in steps of kSubgroups.
// Its lanes share the tile.
const uint kSubgroups = kThreads / kLanes, kHeadsEach = (kHeads + kSubgroups - 1) / kSubgroups;
const uint kScoresEach = (kTile + kLanes - 1) / kLanes;
// For the output, a thread handles a quad of channels of one slice of the tile's values.
const uint kValueDim = kHeadDim - kFirstValue;
const uint kQuads = (kValueDim + 3) / 4, kSlices = kThreads / kQuads, kSliceKeys = (kTile + kSlices - 1) / kSlices;
const bool kEvenSlices = kSlices * kSliceKeys == kTile;
const uint kHeadsAtOnce = kHeads < 4 ? kHeads : 4;  // heads whose slices are added at once
// At the end, a thread handles a quad of channels of a head, or several in turn, of one slice of the parts,
// with kLoads parts at once.
const uint kColumns = kHeads * kQuads < kThreads ? kHeads * kQuads : kThreads, kPartSlices = kThreads / kColumns;
// kPartsEach: parts per lane that computes weights
const uint kLoads = 8, kPartsEach = (kMostParts + kLanes - 1) / kLanes;

// The memory first holds [heads]{first, second channels}[units] of the queries and [heads][tile]{two quads of
// sides} of the scores, then [heads][slices][quads], at the end [slices][heads][quads]. attention.cpp checks
// the size.
const uint kQueryQuads = kHeads * 2 * kUnits, kScoreQuads = kHeads * kTile * 2;
const uint kSliceQuads = kHeadsAtOnce * kThreads;
shared vec4 room[kQueryQuads + kScoreQuads > kSliceQuads ? kQueryQuads + kScoreQuads : kSliceQuads];
const uint kHeadQuads = (kHeads + 3) / 4;
shared vec4 weights[kMostParts * kHeadQuads];  // [tile][heads], at the end [parts][heads]
shared float shrinks[kHeads];                  // factors for a head's results
shared uint entries[2 * kTile];                // of a tile and of the next one, alternating

#include "attend_pool_rows.glsl"
#include "attend_pool_parts.glsl"

// Entries that the row sees: the last ones of a list.
uint visible(uint count) { return push.p.window > 0 ? min(push.p.window, count) : count; }
uint attended(uint head) { return list_count(head, step_entries(step, head_states[push.p.head_state + head])); }
uint tiles_of(uint local_head) { return (visible(attended(push.p.first_head + local_head)) + kTile - 1) / kTile; }
const uint kMostShare = kMostParts;
#include "../shares.glsl"

// Entry i of the list. Its length may still be unknown; beyond the end, the result is any entry.
uint expected_entry(uint head, uint i) { return list_entry(head, kHasList ? min(i, push.p.list_capacity - 2) : i); }

#ifndef BLOCKS
uvec4 keys[kKeysEach * kUnitsEach];
#endif
uvec2 values[kSliceKeys];
vec4 result[kHeads];

#ifdef BLOCKS
void fetch_keys(uint k_start, uint slot) {}  // keys are decoded when they are needed
#else
// Requests the keys and values of the tile whose entries begin at `slot`.
void fetch_keys(uint k_start, uint slot) {
  const uint place = gl_LocalInvocationIndex / kSides, side = gl_LocalInvocationIndex % kSides;
  [[unroll]] for (uint i = 0; i < kKeysEach * kUnitsEach; ++i) {
    const uint unit = side + kSides * (i % kUnitsEach);
    const uint row = k_start + entries[slot + i / kUnitsEach * kPlaces + place] * kWords;
    if (unit < kUnits) keys[i] = load_unit(row, unit);
  }
}
#endif
// A thread's first value.
uint first_value() { return min(gl_LocalInvocationIndex / kQuads, kSlices - 1) * kSliceKeys; }
void fetch_values(uint v_start, uint slot) {
  const uint quad = gl_LocalInvocationIndex % kQuads;
  [[unroll]] for (uint i = 0; i < kSliceKeys; ++i) {
    const uint at = kEvenSlices ? first_value() + i : min(first_value() + i, kTile - 1);
    values[i] = load_quad(v_start + entries[slot + at] * kValueWords, quad);
  }
}

void main() {
  const uint thread = gl_LocalInvocationIndex;
  const uint first_head = gl_WorkGroupID.z * kHeads, heads = min(kHeads, push.p.group - first_head);
  const uvec2 grid = gl_NumWorkGroups.xy, id = gl_WorkGroupID.xy;
  uint head = push.p.first_head + id.y, first = id.x * kTile, stride = grid.x * kTile;
  uint entry = thread < kTile ? expected_entry(head, first + thread) : 0;
  uint next_entry = !kOnce && thread < kTile ? expected_entry(head, first + stride + thread) : 0;
  HeadState own = head_states[push.p.head_state + head];
  uint count = attended(head);
  const Share share = find_share(id.x, id.y, grid.x, grid.y);
  if (share.local_head >= grid.y) return;
  const bool other_head = share.local_head != id.y;
  if (other_head) {
    head = push.p.first_head + share.local_head;
    own = head_states[push.p.head_state + head];
    count = attended(head);
  }
  const uint begin = count - visible(count), asked = first;
  first = begin + share.part * kTile;
  stride = share.parts * kTile;
  if (first >= count || !is_in(own, push.window)) return;
  if (other_head || first != asked || share.parts != grid.x) {
    entry = thread < kTile ? expected_entry(head, first + thread) : 0;
    next_entry = !kOnce && thread < kTile ? expected_entry(head, first + stride + thread) : 0;
  }

  // For indices beyond the list, the part's first entry is read: it is in the cache and gets weight zero.
  if (thread < kTile) {
    entries[thread] = first + thread < count ? entry : list_entry(head, first);
    if (!kOnce) entries[kTile + thread] = first + stride + thread < count ? next_entry : list_entry(head, first);
  }
  barrier();

  // The slowest loads are requested first. Faster ones that are needed later do not occupy registers
  // meanwhile.
  const uint head_start = run_start(own, push.window) * kWords;
#ifdef BLOCKS
  const uint k_start = push.base[1] + head_start, v_start = push.base[2] + run_start(own, push.window) * kValueWords;
#else
  const uint k_start = push.base[1] + head_start, v_start = push.base[2] + head_start + kFirstValue / 2;
#endif
  const uint place = thread / kSides, side = thread % kSides;
  fetch_keys(k_start, 0);
  // The first channel of the first query
  const uint query_channel = (head * push.p.group + first_head) * kHeadDim;
  const uint query_row = push.base[0] + query_channel;
  rotate_queries(query_row, heads, count, first);
  vec4 cosines[kKeysEach * kUnitsEach], sines[kKeysEach * kUnitsEach];
  [[unroll]] for (uint i = 0; i < kKeysEach * kUnitsEach; ++i) {
    const uint unit = unit_of(side, i % kUnitsEach);
    if (kByList && unit < kUnits) load_angles(i / kUnitsEach * kPlaces + place, unit, cosines[i], sines[i]);
  }
  fetch_values(v_start, 0);
  barrier();

  float peaks[kHeadsEach], sums[kHeadsEach];  // of the subgroup's heads; each lane has a part of the sum
  [[unroll]] for (uint j = 0; j < kHeadsEach; ++j) {
    peaks[j] = kNoPeak;
    sums[j] = 0;
  }
  [[unroll]] for (uint h = 0; h < kHeads; ++h) result[h] = vec4(0);

  for (uint tile = first, slot = 0;; tile += stride, slot = kTile - slot) {
    const uint next = tile + stride, next_slot = kTile - slot;
    const bool more = !kOnce && next < count;
    if (more && thread < kTile) next_entry = expected_entry(head, next + stride + thread);

    float dots[kKeysEach * kHeads];
    [[unroll]] for (uint i = 0; i < kKeysEach * kHeads; ++i) dots[i] = 0;
#ifdef BLOCKS
    vec4 x_pair[kKeysEach][2], y_pair[kKeysEach][2];
#endif
    [[unroll]] for (uint u = 0; u < kUnitsEach; ++u) {
      const uint unit = unit_of(side, u);
      if (unit >= kUnits) continue;
      vec4 x[kKeysEach], y[kKeysEach];
      [[unroll]] for (uint i = 0; i < kKeysEach; ++i) {
#ifdef BLOCKS
        if (u % 2 == 0) load_units(k_start + entries[slot + i * kPlaces + place] * kWords, unit, x_pair[i], y_pair[i]);
        x[i] = x_pair[i][u % 2];
        y[i] = y_pair[i][u % 2];
#else
        kv_eight(keys[i * kUnitsEach + u], x[i], y[i]);
        sort_pairs(x[i], y[i], unit);
        if (more) keys[i * kUnitsEach + u] = load_unit(k_start + entries[next_slot + i * kPlaces + place] * kWords, unit);
#endif
        if (!kByList) continue;
        const vec4 c = cosines[i * kUnitsEach + u], s = sines[i * kUnitsEach + u], still_x = x[i];
        x[i] = still_x * c - y[i] * s;
        y[i] = still_x * s + y[i] * c;
      }
      [[unroll]] for (uint h = 0; h < kHeads; ++h) {
        const vec4 query_x = room[h * 2 * kUnits + unit], query_y = room[(h * 2 + 1) * kUnits + unit];
        [[unroll]] for (uint i = 0; i < kKeysEach; ++i) dots[i * kHeads + h] += dot(query_x, x[i]) + dot(query_y, y[i]);
      }
    }
    [[unroll]] for (uint h = 0; h < kHeads; ++h)
      [[unroll]] for (uint i = 0; i < kKeysEach; ++i)
        room[kQueryQuads + (h * kTile + i * kPlaces + place) * 2 + side / 4][side % 4] = dots[i * kHeads + h];
    barrier();

    if (more && thread < kTile)
      entries[slot + thread] = next + stride + thread < count ? next_entry : list_entry(head, first);
    [[unroll]] for (uint j = 0; j < kHeadsEach; ++j) {
      const uint h = gl_SubgroupID + kSubgroups * j;
      if (h >= kHeads) continue;
      float scores[kScoresEach], top = peaks[j];
      [[unroll]] for (uint i = 0; i < kScoresEach; ++i) {
        const uint column = gl_SubgroupInvocationID + kLanes * i;
        scores[i] = kNoPeak;
        if (column < kTile && tile + column < count) {
          const vec4 sides = room[kQueryQuads + (h * kTile + column) * 2] + room[kQueryQuads + (h * kTile + column) * 2 + 1];
          scores[i] = (sides.x + sides.y) + (sides.z + sides.w);
          if (kCaps) scores[i] = soft_cap(scores[i], push.p.cap * kLog2E);
        }
        top = max(top, scores[i]);
      }
      top = max_of_lanes(top);
      const float shrink = exp2(peaks[j] - top);
      peaks[j] = top;
      sums[j] *= shrink;
      [[unroll]] for (uint i = 0; i < kScoresEach; ++i) {
        const uint column = gl_SubgroupInvocationID + kLanes * i;
        if (column >= kTile) continue;
        const float weight = tile + column < count ? exp2(scores[i] - top) : 0;
        weights[column * kHeadQuads + h / 4][h % 4] = weight;
        sums[j] += weight;
      }
      if (gl_SubgroupInvocationID == 0) shrinks[h] = shrink;
    }
    if (more && kByList) rotate_queries(query_row, heads, count, next);
    barrier();

    if (tile != first)
      [[unroll]] for (uint h = 0; h < kHeads; ++h) result[h] *= shrinks[h];
    [[unroll]] for (uint i = 0; i < kSliceKeys; ++i) {
      const uint at = first_value() + i;
      if (!kEvenSlices && at >= kTile) continue;
      const vec4 value = quad_of(values[i], thread % kQuads);
      if (more) values[i] = load_quad(v_start + entries[next_slot + at] * kValueWords, thread % kQuads);
      [[unroll]] for (uint four = 0; four < kHeadQuads; ++four) {
        const vec4 of_heads = weights[at * kHeadQuads + four];
        [[unroll]] for (uint h = 0; h < 4; ++h)
          if (four * 4 + h < kHeads) result[four * 4 + h] += of_heads[h] * value;
      }
    }
    if (next >= count) break;
    if (kOnce) {
      if (thread < kTile) entries[next_slot + thread] = list_entry(head, min(next + thread, count - 1));
      if (kByList) rotate_queries(query_row, heads, count, next);
      barrier();
      fetch_keys(k_start, next_slot);
      fetch_values(v_start, next_slot);
    }
  }

  // Add up the slices to the part's results.
  const uint parts = share.parts, part = share.part, busy = min((count - begin + kTile - 1) / kTile, parts);
  // Results of query heads before these
  const uint before = share.before * push.p.group + first_head * parts;
  const uint own_stats = push.base[6] / 2 + before, own_outs = push.base[5] / 4 + before * kQuads;
  [[unroll]] for (uint j = 0; j < kHeadsEach; ++j) {
    const uint h = gl_SubgroupID + kSubgroups * j;
    if (h >= heads) continue;
    const float sum = sum_of_lanes(sums[j]);
    if (gl_SubgroupInvocationID == 0) stats[own_stats + h * parts + part] = vec2(peaks[j], sum);
  }
  [[unroll]] for (uint from = 0; from < kHeads; from += kHeadsAtOnce) {
    if (from > 0) barrier();
    [[unroll]] for (uint h = 0; h < kHeadsAtOnce; ++h)
      if (from + h < kHeads && thread < kSlices * kQuads) room[h * kSlices * kQuads + thread] = result[from + h];
    barrier();
    [[unroll]] for (uint first_sum = 0; first_sum < kHeadsAtOnce * kQuads; first_sum += kThreads) {
      const uint i = first_sum + thread, h = i / kQuads, at = h * kSlices * kQuads + i % kQuads;
      if (h >= kHeadsAtOnce || from + h >= heads) continue;
      vec4 sum = room[at];
      for (uint slice = 1; slice < kSlices; ++slice) sum += room[at + slice * kQuads];
#ifdef BLOCKS
      room[at] = sum;
    }
    barrier();
    [[unroll]] for (uint first_sum = 0; first_sum < kHeadsAtOnce * kQuads; first_sum += kThreads) {
      const uint i = first_sum + thread, h = i / kQuads, at = h * kSlices * kQuads + i % kQuads;
      if (h >= kHeadsAtOnce || from + h >= heads) continue;
      const vec4 sum = kValueFormat == kHalfRows ? room[at] : transformed_back(at & ~7u, i % 8);
#endif
      outs[own_outs + ((from + h) * parts + part) * kQuads + i % kQuads] = sum;
    }
  }
  if (!finishes_last(push.base[7] + share.local_head * gl_NumWorkGroups.z + gl_WorkGroupID.z, busy)) return;
  join_parts(own_stats, own_outs, head * push.p.group + first_head, heads, parts, busy);
}
