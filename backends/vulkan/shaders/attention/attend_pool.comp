// attention of one row from the pool, gathered and rotated on the way: a workgroup attends with the query heads of one KV head
// to a part of the list, tile by tile, and the last one puts the parts together.
//
// A token waits for each read that depends on another, and for code, as most of it is run once: little of both is what counts
// here. Tile i belongs to part i % parts, so its entries are asked for before it is known how many there are.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#include "../../pool_parts.h"
#include "../half.glsl"
#include "../step.glsl"

layout(local_size_x_id = 8) in;  // a multiple of kLanes
const uint kThreads = gl_WorkGroupSize.x;
layout(constant_id = 0) const uint kHeadDim = 128;
layout(constant_id = 1) const uint kHeads = 4;  // query heads of a pass, at most kMostHeads
layout(constant_id = 2) const bool kHasList = false;
layout(constant_id = 3) const uint kMode = kRopeList;  // RopeParams
layout(constant_id = 4) const uint kPairing = kRopeHalves;
layout(constant_id = 5) const uint kRotating = 128;
layout(constant_id = 6) const bool kAligned = false;  // 8 channels rotate alike, and are two uvec2
layout(constant_id = 7) const bool kOnce = false;     // no part has more than one tile
layout(constant_id = 9) const uint kLanes = 32;       // of a subgroup

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer K { uint k[]; };  // from first_head on, as v
layout(set = 0, binding = 2, std430) readonly buffer K2 { uvec2 k2[]; };
layout(set = 0, binding = 3, std430) readonly buffer V { uint v[]; };
layout(set = 0, binding = 3, std430) readonly buffer V2 { uvec2 v2[]; };
layout(set = 0, binding = 4, std430) readonly buffer List { uint list[]; };
layout(set = 0, binding = 5, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 5, std430) readonly buffer Rope4 { vec4 rope_table4[]; };
// [query heads][parts][quads of channels] before the division by the sum, and [query heads][parts]{maximum, sum}; from
// first_head on, as the counters, one for each pass over a KV head's group
layout(set = 0, binding = 6, std430) coherent buffer Outs { vec4 outs[]; };
layout(set = 0, binding = 7, std430) coherent buffer Stats { vec2 stats[]; };
layout(set = 0, binding = 8, std430) coherent buffer Counters { uint counters[]; };
layout(set = 0, binding = 9, std430) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
  AttentionParams p;
  uint base[9];
} push;

#define ROPE RopeParams(kMode, kPairing, kRotating)
#define ROPE_BASE push.base[4]
#include "../rope.glsl"
#define LIST_BASE push.base[3]
#define LIST_CAPACITY push.p.list_capacity
#include "../list.glsl"
#include "../lanes.glsl"
#include "../last_group.glsl"

const float kLog2E = 1.44269504;  // queries are scaled by it, so that the softmax works in base 2
const float kNoPeak = -3e38;      // below every score; finite, as not every device computes with infinities
const bool kByList = kMode == kRopeList;

// A unit is four pairs of channels. In the scores, thread (place, side) has the units side, side + kSides, ... of the keys
// place and place + kPlaces of a tile. A key rotates by its place in the tile, so a thread's angles stay the same, and the
// query by what then is missing.
const uint kUnits = (kHeadDim + 7) / 8, kSides = 8, kUnitsEach = (kUnits + kSides - 1) / kSides;
const uint kKeysEach = 2, kPlaces = kThreads / kSides, kTile = kKeysEach * kPlaces;
// In the softmax, a subgroup has whole heads: gl_SubgroupID, and so on in steps of kSubgroups. Its lanes share the tile.
const uint kSubgroups = kThreads / kLanes, kHeadsEach = (kHeads + kSubgroups - 1) / kSubgroups;
const uint kScoresEach = (kTile + kLanes - 1) / kLanes;
// In the output, a thread has a quad of channels of one slice of the tile's values.
const uint kQuads = (kHeadDim + 3) / 4, kSlices = kThreads / kQuads, kSliceKeys = (kTile + kSlices - 1) / kSlices;
const bool kEvenSlices = kSlices * kSliceKeys == kTile;
const uint kHeadsAtOnce = kHeads < 4 ? kHeads : 4;  // that slices are added up for
// At the end, a thread has a head's quad of channels, or several in turns, of one slice of the parts, kLoads parts at once.
const uint kColumns = kHeads * kQuads < kThreads ? kHeads * kQuads : kThreads, kPartSlices = kThreads / kColumns;
const uint kLoads = 8, kPartsEach = (kMostParts + kLanes - 1) / kLanes;  // the latter of a lane that weighs them

// First [heads]{first, second channels}[units] of the queries and [heads][tile]{two quads of sides} of the scores, then
// [heads][slices][quads], at the end [slices][heads][quads]. attention.cpp knows what fits.
const uint kQueryQuads = kHeads * 2 * kUnits, kScoreQuads = kHeads * kTile * 2;
const uint kSliceQuads = kHeadsAtOnce * kThreads;
shared vec4 room[kQueryQuads + kScoreQuads > kSliceQuads ? kQueryQuads + kScoreQuads : kSliceQuads];
const uint kHeadQuads = (kHeads + 3) / 4;
shared vec4 weights[kMostParts * kHeadQuads];  // [tile][heads], at the end [parts][heads]
shared float shrinks[kHeads];                  // that a head's results are multiplied by
shared uint entries[2 * kTile];                // of a tile and of the next one, by turns

uvec4 keys[kKeysEach * kUnitsEach];
uvec2 values[kSliceKeys];
vec4 result[kHeads];

// Whether the channels of pair i lie side by side.
bool adjacent(uint i) { return kPairing == kRopeAdjacent || i >= rope_pairs(); }

// Where the two quads of channels of a unit lie in an aligned row, and how to make its first and second channels of them.
uvec2 unit_quads(uint unit) {
  return adjacent(unit * 4) ? uvec2(2 * unit, 2 * unit + 1) : uvec2(unit, unit + rope_pairs() / 4);
}
void sort_pairs(inout vec4 x, inout vec4 y, uint unit) {
  if (!kAligned || !adjacent(unit * 4)) return;
  const vec4 low = x, high = y;
  x = vec4(low.xz, high.xz);
  y = vec4(low.yw, high.yw);
}

uint k_half(uint row, uint c) { return c < kHeadDim ? k[row + c / 2] >> c % 2 * 16 & 0xffff : 0; }

// The halves of a unit of a key; `row` is the key's first word.
uvec4 load_unit(uint row, uint unit) {
  if (kAligned) {
    const uvec2 quads = row / 2 + unit_quads(unit);
    return uvec4(k2[quads.x], k2[quads.y]);
  }
  uvec4 halves;
  [[unroll]] for (uint i = 0; i < 2; ++i) {
    const uint pair = unit * 4 + i * 2;
    halves[i] = k_half(row, channels_of(pair).x) | k_half(row, channels_of(pair + 1).x) << 16;
    halves[i + 2] = k_half(row, channels_of(pair).y) | k_half(row, channels_of(pair + 1).y) << 16;
  }
  return halves;
}
// The angles of a unit in a row of the table; pairs that do not rotate stay as they are.
void load_angles(uint row, uint unit, out vec4 cosines, out vec4 sines) {
  cosines = vec4(1);
  sines = vec4(0);
  if (kAligned) {
    if (unit * 4 >= rope_pairs()) return;
    const uint at = (ROPE_BASE + 2 * (row * rope_pairs() + unit * 4)) / 4;
    const vec4 low = rope_table4[at], high = rope_table4[at + 1];
    cosines = vec4(low.xz, high.xz);
    sines = vec4(low.yw, high.yw);
    return;
  }
  [[unroll]] for (uint i = 0; i < 4; ++i) {
    if (unit * 4 + i >= rope_pairs()) continue;
    const vec2 angle = rope_row(row, unit * 4 + i);
    cosines[i] = angle.x;
    sines[i] = angle.y;
  }
}

// A quad of channels of a value.
uvec2 load_quad(uint row, uint quad) {
  if (kAligned) return v2[row / 2 + quad];
  return uvec2(v[row + 2 * quad], 2 * quad + 1 < kHeadDim / 2 ? v[row + 2 * quad + 1] : 0);
}

// Entry i of the list; anything where the list is not as long, which need not be known yet.
uint expected_entry(uint head, uint i) { return list_entry(head, kHasList ? min(i, push.p.list_capacity - 2) : i); }

// Rotates the queries, the first of which starts at `row`. No branch keeps what follows from being asked for meanwhile.
void rotate_queries(uint row, uint heads, uint position) {
  const uint kPairs = kUnits * 4;
  // The model's attention factor counts for query and key, but the low half of the table, which rotates keys, lacks it.
  const float factor = kByList && rope_pairs() > 0 ? rope_factor() : 1;
  [[unroll]] for (uint first = 0; first < kHeads * kPairs; first += kThreads) {
    const uint i = min(first + gl_LocalInvocationIndex, kHeads * kPairs - 1), h = i / kPairs, pair = i % kPairs;
    const uint from = row + min(h, heads - 1) * kHeadDim;
    const bool there = pair < kHeadDim / 2;
    const float x = there ? q[from + channels_of(pair).x] * (push.p.scale * kLog2E) : 0;
    const float y = there ? q[from + channels_of(pair).y] * (push.p.scale * kLog2E) : 0;
    const vec2 angle = pair < rope_pairs() ? rope_angle(position, pair) * factor : vec2(1, 0);
    if (first + gl_LocalInvocationIndex >= kHeads * kPairs) continue;
    const uint to = h * 2 * kUnits + pair / 4;
    room[to][pair % 4] = x * angle.x - y * angle.y;
    room[to + kUnits][pair % 4] = x * angle.y + y * angle.x;
  }
}

// weights[] of the parts of the subgroup's heads.
void weigh_parts(uint own_stats, uint heads, uint busy) {
  [[unroll]] for (uint j = 0; j < kHeadsEach; ++j) {
    const uint h = gl_SubgroupID + kSubgroups * j;
    if (h >= heads) continue;
    vec2 of_parts[kPartsEach];  // {maximum, sum}
    float top = kNoPeak, sum = 0;
    [[unroll]] for (uint i = 0; i < kPartsEach; ++i) {
      const uint part = gl_SubgroupInvocationID + kLanes * i;
      of_parts[i] = stats[own_stats + h * gl_NumWorkGroups.x + min(part, busy - 1)];
      if (part >= busy) of_parts[i].y = 0;
      top = max(top, of_parts[i].x);
    }
    top = max_of_lanes(top);
    [[unroll]] for (uint i = 0; i < kPartsEach; ++i) {
      of_parts[i].x = exp2(of_parts[i].x - top);
      sum += of_parts[i].x * of_parts[i].y;
    }
    const float factor = 1 / sum_of_lanes(sum);
    [[unroll]] for (uint i = 0; i < kPartsEach; ++i) {
      const uint part = gl_SubgroupInvocationID + kLanes * i;
      if (part < busy) weights[part * kHeadQuads + h / 4][h % 4] = of_parts[i].x * factor;
    }
  }
}

void main() {
  const uint thread = gl_LocalInvocationIndex, parts = gl_NumWorkGroups.x, part = gl_WorkGroupID.x;
  const uint local_head = gl_WorkGroupID.y, first_head = gl_WorkGroupID.z * kHeads;
  const uint head = push.p.first_head + local_head, heads = min(kHeads, push.p.group - first_head);
  const uint first = part * kTile, stride = parts * kTile;
  uint entry = thread < kTile ? expected_entry(head, first + thread) : 0;
  uint next_entry = !kOnce && thread < kTile ? expected_entry(head, first + stride + thread) : 0;
  const uint count = list_count(head);
  if (first >= count) return;

  // What is read for an entry that there is not is the part's first one: it lies in the cache and weighs nothing.
  if (thread < kTile) {
    entries[thread] = first + thread < count ? entry : list_entry(head, first);
    if (!kOnce) entries[kTile + thread] = first + stride + thread < count ? next_entry : list_entry(head, first);
  }
  barrier();

  // What takes longest is asked for first; what comes sooner and is needed later takes no registers meanwhile.
  const uint words = kHeadDim / 2, head_start = local_head * push.p.capacity * words;
  const uint k_start = push.base[1] + head_start, v_start = push.base[2] + head_start;
  const uint place = thread / kSides, side = thread % kSides;
  [[unroll]] for (uint i = 0; i < kKeysEach * kUnitsEach; ++i) {
    const uint unit = side + kSides * (i % kUnitsEach), row = k_start + entries[i / kUnitsEach * kPlaces + place] * words;
    if (unit < kUnits) keys[i] = load_unit(row, unit);
  }
  const uint first_query = local_head * push.p.group + first_head;
  const uint query_row = push.base[0] + (push.p.first_head * push.p.group + first_query) * kHeadDim;
  rotate_queries(query_row, heads, kByList ? count - 1 - first : uint(step.position));
  vec4 cosines[kKeysEach * kUnitsEach], sines[kKeysEach * kUnitsEach];
  [[unroll]] for (uint i = 0; i < kKeysEach * kUnitsEach; ++i) {
    const uint unit = side + kSides * (i % kUnitsEach);
    if (kByList && unit < kUnits) load_angles(i / kUnitsEach * kPlaces + place, unit, cosines[i], sines[i]);
  }
  const uint quad = thread % kQuads, first_value = min(thread / kQuads, kSlices - 1) * kSliceKeys;
  [[unroll]] for (uint i = 0; i < kSliceKeys; ++i)
    values[i] = load_quad(v_start + entries[kEvenSlices ? first_value + i : min(first_value + i, kTile - 1)] * words, quad);
  barrier();

  float peaks[kHeadsEach], sums[kHeadsEach];  // of the subgroup's heads, the sums in parts
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
    [[unroll]] for (uint u = 0; u < kUnitsEach; ++u) {
      const uint unit = side + kSides * u;
      if (unit >= kUnits) continue;
      vec4 x[kKeysEach], y[kKeysEach];
      [[unroll]] for (uint i = 0; i < kKeysEach; ++i) {
        unpack_halves(keys[i * kUnitsEach + u], x[i], y[i]);
        sort_pairs(x[i], y[i], unit);
        if (more) keys[i * kUnitsEach + u] = load_unit(k_start + entries[next_slot + i * kPlaces + place] * words, unit);
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
    if (more && kByList) rotate_queries(query_row, heads, count - 1 - next);
    barrier();

    if (tile != first)
      [[unroll]] for (uint h = 0; h < kHeads; ++h) result[h] *= shrinks[h];
    [[unroll]] for (uint i = 0; i < kSliceKeys; ++i) {
      const uint at = first_value + i;
      if (!kEvenSlices && at >= kTile) continue;
      const vec4 value = vec4(unpackHalf2x16(values[i].x), unpackHalf2x16(values[i].y));
      if (more) values[i] = load_quad(v_start + entries[next_slot + at] * words, quad);
      [[unroll]] for (uint four = 0; four < kHeadQuads; ++four) {
        const vec4 of_heads = weights[at * kHeadQuads + four];
        [[unroll]] for (uint h = 0; h < 4; ++h)
          if (four * 4 + h < kHeads) result[four * 4 + h] += of_heads[h] * value;
      }
    }
    if (!more) break;
  }

  // The part's results: slices are added up.
  const uint busy = min((count + kTile - 1) / kTile, parts);
  const uint own_stats = push.base[6] / 2 + first_query * parts, own_outs = push.base[5] / 4 + first_query * parts * kQuads;
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
      outs[own_outs + ((from + h) * parts + part) * kQuads + i % kQuads] = sum;
    }
  }
  if (!finishes_last(push.base[7] + gl_WorkGroupID.y * gl_NumWorkGroups.z + gl_WorkGroupID.z, busy)) return;

  const uint part_slice = thread / kColumns;
  for (uint from = 0; from < kHeads * kQuads; from += kColumns) {
    const uint i = min(from + thread % kColumns, heads * kQuads - 1), h = i / kQuads;
    const uint column = own_outs + h * parts * kQuads + i % kQuads;
    vec4 of_parts[kLoads];  // they come while their weights are worked out
    [[unroll]] for (uint n = 0; n < kLoads; ++n)
      of_parts[n] = outs[column + min(part_slice + n * kPartSlices, busy - 1) * kQuads];
    if (from == 0) {
      weigh_parts(own_stats, heads, busy);
      barrier();
    }
    vec4 sum = vec4(0);
    // No branches here: what there is not weighs nothing, and is read from where something is.
    [[dont_unroll]] for (uint first_part = part_slice; first_part < busy; first_part += kLoads * kPartSlices)
      [[unroll]] for (uint n = 0; n < kLoads; ++n) {
        const uint own = first_part + n * kPartSlices, next = own + kLoads * kPartSlices;
        const float weight = weights[min(own, busy - 1) * kHeadQuads + h / 4][h % 4];
        sum += (own < busy ? weight : 0) * of_parts[n];
        of_parts[n] = outs[column + min(next, busy - 1) * kQuads];
      }
    if (kPartSlices > 1) {  // and so there is one turn
      room[thread] = sum;
      barrier();
      for (uint slice = 1; slice < kPartSlices; ++slice) sum += room[thread % kColumns + slice * kColumns];
    }
    if (thread >= kColumns || from + thread >= heads * kQuads) continue;
    const uint to = push.base[8] + (push.p.first_head * push.p.group + first_query + h) * kHeadDim + i % kQuads * 4;
    [[unroll]] for (uint c = 0; c < 4; ++c)
      if (i % kQuads * 4 + c < kHeadDim) y[to + c] = sum[c];
  }
}
