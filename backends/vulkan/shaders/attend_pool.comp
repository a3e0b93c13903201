// attention of one row from the pool, gathered and rotated on the way: a workgroup attends with the query heads of one KV head
// to a part of the list, and the last one puts the parts together.
//
// Keys rotate by their place in a tile of kTileKeys, so a thread's angles stay the same; the query by what then is missing.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "half.glsl"
#include "pool_parts.glsl"
#include "step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kHeadDim = 128;
layout(constant_id = 1) const uint kHeads = 4;  // query heads of a pass, at most kMostHeads
layout(constant_id = 2) const bool kHasList = false;
layout(constant_id = 3) const bool kAdjacent = false;  // kRopeAdjacent
layout(constant_id = 4) const bool kAligned = false;   // 8 channels rotate alike, and are two uvec2

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer K { uint k[]; };  // from first_head on, as v
layout(set = 0, binding = 2, std430) readonly buffer K2 { uvec2 k2[]; };
layout(set = 0, binding = 3, std430) readonly buffer V { uint v[]; };
layout(set = 0, binding = 3, std430) readonly buffer V2 { uvec2 v2[]; };
layout(set = 0, binding = 4, std430) readonly buffer List { uint list[]; };
layout(set = 0, binding = 5, std430) readonly buffer Rope { float rope_table[]; };
// [query heads][parts][quads of channels] before the division by the sum, and [query heads][parts]{maximum, sum}; from
// first_head on, as the counters, one for each pass over a KV head's group
layout(set = 0, binding = 6, std430) coherent buffer Outs { vec4 outs[]; };
layout(set = 0, binding = 7, std430) coherent buffer Stats { vec2 stats[]; };
layout(set = 0, binding = 8, std430) coherent buffer Counters { uint counters[]; };
layout(set = 0, binding = 9, std430) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
  AttentionParams p;
  uint passes;  // over a group
  uint base[9];
} push;

#define ROPE push.p.rope
#define ROPE_BASE push.base[4]
#include "rope.glsl"
#define LIST_BASE push.base[3]
#define LIST_CAPACITY push.p.list_capacity
#include "list.glsl"
#include "last_group.glsl"

const float kLog2E = 1.44269504;  // queries are scaled by it, so that the softmax works in base 2
const float kNoPeak = -3e38;      // below every score; finite, as not every device computes with infinities

// A unit is four pairs of channels. In the scores, thread (key, side) has the units side, side + 4, ... of a key.
const uint kUnits = (kHeadDim + 7) / 8, kSides = 4, kUnitsEach = (kUnits + kSides - 1) / kSides;
shared vec4 queries[kHeads * kUnits * 2];                 // rotated, of a unit the first and then the second channels
const uint kQueriesEach = (kHeads * kUnits + 127) / 128;         // units of a thread that rotates them
// In the softmax, a head has 16 threads with two keys each.
const uint kSharers = 128 / kMostHeads;
shared vec4 partial[kMostHeads * kTileKeys];  // of the scores, by side; at the end [heads][parts]weight
shared float tops[kMostHeads * kSharers];
shared float weights[kMostHeads * kTileKeys];
shared float factors[kMostHeads];  // that a head's results are multiplied by
// In the output, a thread has a quad of channels of one slice of the tile's values, at the end of the parts.
const uint kQuads = (kHeadDim + 3) / 4, kSlices = 128 / kQuads, kSliceKeys = (kTileKeys + kSlices - 1) / kSlices;
shared uint next_entries[kTileKeys];  // of the tile behind
vec4 result[kHeads];

// The channels of pair i: two that rotate together; behind n_rot any two.
uint x_channel(uint i) { return kAdjacent || i >= rope_pairs() ? 2 * i : i; }
uint y_channel(uint i) { return kAdjacent || i >= rope_pairs() ? 2 * i + 1 : i + rope_pairs(); }

uint k_half(uint row, uint c) { return c < kHeadDim ? k[row + c / 2] >> c % 2 * 16 & 0xffff : 0; }

// The halves of a unit of a key; `row` is the key's first word. Four first channels and then four second ones, or where they
// lie so in memory, pair by pair.
bool by_pairs(uint unit) { return kAligned && (kAdjacent || unit * 4 >= rope_pairs()); }
uvec4 load_unit(uint row, uint unit) {
  if (kAligned) {
    const uint first = by_pairs(unit) ? unit * 4 : unit * 2, second = by_pairs(unit) ? first + 2 : first + rope_pairs() / 2;
    return uvec4(k2[(row + first) / 2], k2[(row + second) / 2]);
  }
  uvec4 halves;
  [[unroll]] for (uint i = 0; i < 2; ++i) {
    const uint pair = unit * 4 + i * 2;
    halves[i] = k_half(row, x_channel(pair)) | k_half(row, x_channel(pair + 1)) << 16;
    halves[i + 2] = k_half(row, y_channel(pair)) | k_half(row, y_channel(pair + 1)) << 16;
  }
  return halves;
}
void unpack_unit(uvec4 halves, uint unit, out vec4 x, out vec4 y) {
  vec4 low, high;
  unpack_halves(halves, low, high);
  x = by_pairs(unit) ? vec4(low.xz, high.xz) : low;
  y = by_pairs(unit) ? vec4(low.yw, high.yw) : high;
}

// A quad of channels of a value.
uvec2 load_quad(uint row, uint quad) {
  if (kAligned) return v2[row / 2 + quad];
  return uvec2(v[row + 2 * quad], 2 * quad + 1 < kHeadDim / 2 ? v[row + 2 * quad + 1] : 0);
}

// queries[head * kQuads + quad] becomes the sum of all slices' results.
void add_up_slices(uint slice, uint quad) {
  for (uint turn = 0; turn < kSlices; ++turn) {
    if (slice == turn)
      [[unroll]] for (uint h = 0; h < kHeads; ++h)
        queries[h * kQuads + quad] = turn == 0 ? result[h] : queries[h * kQuads + quad] + result[h];
    barrier();
  }
}
// Over the threads that share a head. All have passed a barrier since the last call.
float max_of_sharers(float own) {
  tops[gl_LocalInvocationIndex] = own;
  barrier();
  for (uint i = 0; i < kSharers; ++i) own = max(own, tops[gl_LocalInvocationIndex / kSharers * kSharers + i]);
  return own;
}
float sum_of_sharers(float own) {
  tops[gl_LocalInvocationIndex] = own;
  barrier();
  float sum = 0;
  for (uint i = 0; i < kSharers; ++i) sum += tops[gl_LocalInvocationIndex / kSharers * kSharers + i];
  return sum;
}

// What parts have left in a quad, for the last group: of each head so many that are under way at once.
const uint kLoads = 16 / kHeads;
vec4 of_part[kLoads * kHeads];
void load_parts(uint first_part, uint first_query, uint heads, uint quad, uint busy) {
  [[unroll]] for (uint i = 0; i < kLoads * kHeads; ++i) {
    const uint part = min(first_part + i / kHeads * kSlices, busy - 1), h = min(i % kHeads, heads - 1);
    of_part[i] = outs[push.base[5] / 4 + ((first_query + h) * gl_NumWorkGroups.x + part) * kQuads + quad];
  }
}

void main() {
  const uint thread = gl_LocalInvocationIndex, parts = gl_NumWorkGroups.x;
  const uint local_head = gl_WorkGroupID.y / push.passes, first_head = gl_WorkGroupID.y % push.passes * kHeads;
  const uint head = push.p.first_head + local_head, heads = min(kHeads, push.p.group - first_head);
  const uint count = list_count(head), share = part_entries(count, parts), first = gl_WorkGroupID.x * share;
  if (first >= count) return;
  const uint end = min(first + share, count);
  const uint words = kHeadDim / 2, head_start = local_head * push.p.capacity * words;
  const uint k_start = push.base[1] + head_start, v_start = push.base[2] + head_start;
  const bool by_list = push.p.rope.mode == kRopeList;

  const uint key = thread / kSides, side = thread % kSides;
  // Entries are asked for two tiles ahead, keys one.
  uint entry = first + key < end ? list_entry(head, first + key) : 0;
  uint next_entry = first + kTileKeys + key < end ? list_entry(head, first + kTileKeys + key) : 0;

  // What this thread keeps: its angles, its units of the queries, its results.
  vec4 own_x[kQueriesEach], own_y[kQueriesEach];
  [[unroll]] for (uint j = 0; j < kQueriesEach; ++j) {
    own_x[j] = own_y[j] = vec4(0);
    const uint at = thread + 128 * j, h = at / kUnits, unit = at % kUnits;
    if (h >= heads) continue;
    const uint row = push.base[0] + (head * push.p.group + first_head + h) * kHeadDim;
    [[unroll]] for (uint i = 0; i < 4; ++i) {
      const uint x = x_channel(unit * 4 + i), y = y_channel(unit * 4 + i);
      if (x < kHeadDim) own_x[j][i] = q[row + x] * (push.p.scale * kLog2E);
      if (y < kHeadDim) own_y[j][i] = q[row + y] * (push.p.scale * kLog2E);
    }
  }
  vec4 cosines[kUnitsEach], sines[kUnitsEach];
  [[unroll]] for (uint u = 0; u < kUnitsEach; ++u) {
    cosines[u] = vec4(1);
    sines[u] = vec4(0);
    [[unroll]] for (uint i = 0; i < 4; ++i) {
      const uint pair = (side + kSides * u) * 4 + i;
      if (!by_list || pair >= rope_pairs()) continue;
      const vec2 angle = rope_row(key, pair);
      cosines[u][i] = angle.x;
      sines[u][i] = angle.y;
    }
  }
  // The model's attention factor counts for query and key, but the low half of the table, which rotates keys, lacks it.
  const float factor = by_list && rope_pairs() > 0 ? rope_factor() : 1;
  [[unroll]] for (uint h = 0; h < kHeads; ++h) result[h] = vec4(0);
  const uint own_head = thread / kSharers, sharer = thread % kSharers;
  float peak = kNoPeak, sum = 0;  // of own_head, the sum in parts
  const uint quad = thread % kQuads, slice = thread / kQuads;

  uvec4 keys[kUnitsEach];  // of the next tile
  [[unroll]] for (uint u = 0; u < kUnitsEach; ++u)
    if (side + kSides * u < kUnits && first + key < end) keys[u] = load_unit(k_start + entry * words, side + kSides * u);
  uvec2 values[kSliceKeys];  // alike
  [[unroll]] for (uint i = 0; i < kSliceKeys; ++i) {
    const uint place = slice * kSliceKeys + i;
    values[i] = uvec2(0);
    if (place < min(kTileKeys, end - first)) values[i] = load_quad(v_start + list_entry(head, first + place) * words, quad);
  }

  for (uint tile = first; tile < end; tile += kTileKeys) {
    // Before the first tile, and for each one where keys rotate by their place.
    if (by_list || tile == first) {
      const uint position = by_list ? count - 1 - tile : uint(step.position);
      [[unroll]] for (uint j = 0; j < kQueriesEach; ++j) {
        const uint at = thread + 128 * j;
        if (at >= kHeads * kUnits) continue;
        vec4 x = own_x[j], y = own_y[j];
        [[unroll]] for (uint i = 0; i < 4; ++i) {
          const uint pair = at % kUnits * 4 + i;
          if (pair >= rope_pairs()) continue;
          const vec2 angle = rope_angle(position, pair) * factor;
          x[i] = own_x[j][i] * angle.x - own_y[j][i] * angle.y;
          y[i] = own_x[j][i] * angle.y + own_y[j][i] * angle.x;
        }
        queries[2 * at] = x;
        queries[2 * at + 1] = y;
      }
    }
    barrier();

    float dots[kHeads];
    [[unroll]] for (uint h = 0; h < kHeads; ++h) dots[h] = 0;
    if (tile + key < end)
      [[unroll]] for (uint u = 0; u < kUnitsEach; ++u) {
        const uint unit = side + kSides * u;
        if (unit >= kUnits) continue;
        vec4 x, y;
        unpack_unit(keys[u], unit, x, y);
        if (tile + kTileKeys + key < end) keys[u] = load_unit(k_start + next_entry * words, unit);
        const vec4 turned_x = x * cosines[u] - y * sines[u], turned_y = x * sines[u] + y * cosines[u];
        [[unroll]] for (uint h = 0; h < kHeads; ++h)
          dots[h] += dot(queries[(h * kUnits + unit) * 2], turned_x) + dot(queries[(h * kUnits + unit) * 2 + 1], turned_y);
      }
    if (side == 0) next_entries[key] = next_entry;
    if (tile + 2 * kTileKeys + key < end) next_entry = list_entry(head, tile + 2 * kTileKeys + key);
    [[unroll]] for (uint h = 0; h < kHeads; ++h) partial[h * kTileKeys + key][side] = dots[h];
    barrier();

    float scores[2], top = peak;
    [[unroll]] for (uint j = 0; j < 2; ++j) {
      const uint column = sharer + kSharers * j;
      scores[j] = kNoPeak;
      if (own_head < kHeads && tile + column < end) {
        const vec4 by_side = partial[own_head * kTileKeys + column];
        scores[j] = (by_side.x + by_side.y) + (by_side.z + by_side.w);
      }
      top = max(top, scores[j]);
    }
    top = max_of_sharers(top);
    const float shrink = exp2(peak - top);
    peak = top;
    sum *= shrink;
    [[unroll]] for (uint j = 0; j < 2; ++j) {
      const uint column = sharer + kSharers * j;
      const float weight = tile + column < end ? exp2(scores[j] - peak) : 0;
      sum += weight;
      weights[own_head * kTileKeys + column] = weight;
    }
    if (sharer == 0) factors[own_head] = shrink;
    barrier();

    if (slice < kSlices) {
      [[unroll]] for (uint h = 0; h < kHeads; ++h) result[h] *= factors[h];
      [[unroll]] for (uint i = 0; i < kSliceKeys; ++i) {
        const uint place = slice * kSliceKeys + i;
        if (place >= kTileKeys) continue;
        const vec4 value = vec4(unpackHalf2x16(values[i].x), unpackHalf2x16(values[i].y));
        values[i] = uvec2(0);
        if (tile + kTileKeys + place < end) values[i] = load_quad(v_start + next_entries[place] * words, quad);
        [[unroll]] for (uint h = 0; h < kHeads; ++h) result[h] += weights[h * kTileKeys + place] * value;
      }
    }
  }

  // The part's results; they are all where there is one part.
  const uint first_query = local_head * push.p.group + first_head, busy = busy_parts(count, parts);
  sum = sum_of_sharers(sum);
  if (busy > 1) {
    if (own_head < heads && sharer == 0)
      stats[push.base[6] / 2 + (first_query + own_head) * parts + gl_WorkGroupID.x] = vec2(peak, sum);
    add_up_slices(slice, quad);
    for (uint i = thread; i < heads * kQuads; i += 128)
      outs[push.base[5] / 4 + ((first_query + i / kQuads) * parts + gl_WorkGroupID.x) * kQuads + i % kQuads] = queries[i];
    if (!finishes_last(push.base[7] + gl_WorkGroupID.y, busy)) return;

    load_parts(slice, first_query, heads, quad, busy);  // they come while their weights are worked out
    const uint kEach = kMostParts / kSharers, own_stats = push.base[6] / 2 + (first_query + own_head) * parts;
    vec2 of_parts[kEach];
    float top = kNoPeak;
    [[unroll]] for (uint i = 0; i < kEach; ++i) {
      const uint part = sharer + kSharers * i;
      of_parts[i] = vec2(kNoPeak, 0);
      if (part < busy && own_head < heads) of_parts[i] = stats[own_stats + part];
    }
    [[unroll]] for (uint i = 0; i < kEach; ++i) top = max(top, of_parts[i].x);
    peak = max_of_sharers(top);
    sum = 0;
    [[unroll]] for (uint i = 0; i < kEach; ++i) {
      const uint part = sharer + kSharers * i;
      const float weight = exp2(of_parts[i].x - max(peak, kNoPeak / 2));
      partial[own_head * kMostParts / 4 + part / 4][part % 4] = weight;  // 0 of those that there are not
      sum += weight * of_parts[i].y;
    }
    barrier();
    sum = sum_of_sharers(sum);
    [[unroll]] for (uint h = 0; h < kHeads; ++h) result[h] = vec4(0);
    for (uint turn = 0; slice < kSlices && slice + turn * kLoads * kSlices < busy; ++turn) {
      const uint first_part = slice + turn * kLoads * kSlices;
      if (turn > 0) load_parts(first_part, first_query, heads, quad, busy);
      [[unroll]] for (uint i = 0; i < kLoads * kHeads; ++i) {
        const uint part = first_part + i / kHeads * kSlices;
        if (part < busy) result[i % kHeads] += partial[i % kHeads * kMostParts / 4 + part / 4][part % 4] * of_part[i];
      }
    }
  }
  if (sharer == 0) factors[own_head] = 1 / sum;
  add_up_slices(slice, quad);
  for (uint i = thread; i < heads * kHeadDim; i += 128)
    y[push.base[8] + (push.p.first_head * push.p.group + first_query) * kHeadDim + i] =
        queries[i / kHeadDim * kQuads + i % kHeadDim / 4][i % kHeadDim % 4] * factors[i / kHeadDim];
}
