// Shared by both shaders of attention to the view: operands, which keys a query sees, and how rows are read.
// The includer has declared these constants: kThreads, the size of a workgroup; kLanes, lanes per subgroup;
// kHeadDim; kFirstValue, the channel of a row of v where the value begins; kRows, queries per workgroup; kKeys, keys per tile; kHasList; kAligned: rows of k and v consist
// of whole uvec4; kCaps: scores are capped; kHasSinks; kHasIndices: rows state the list index of their own
// entries, and there is no window.
//
// A query vector is one query head of one row. Those of a KV head are numbered row * group + query head of
// the group, because all of them read the same keys and values.
#include "../half.glsl"
#include "../soft_cap.glsl"
#include "../step.glsl"

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer K { uint k[]; };  // from first_head on; so is v
layout(set = 0, binding = 2, std430) readonly buffer K4 { uvec4 k4[]; };
layout(set = 0, binding = 3, std430) readonly buffer V { uint v[]; };
layout(set = 0, binding = 3, std430) readonly buffer V4 { uvec4 v4[]; };
layout(set = 0, binding = 4, std430) readonly buffer List { uint list[]; };
layout(set = 0, binding = 5, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 6, std430) coherent buffer Y { float y[]; };
layout(set = 0, binding = 7, std430) coherent buffer Ml { float ml[]; };  // [rows][query_heads]{maximum, sum}
// For the parts of a head except the first, [parts][query vectors][quads of channels] before division by the
// sum, and [parts][query vectors]{maximum, sum}; and a counter for each workgroup's queries of a head that is
// processed in parts.
layout(set = 0, binding = 8, std430) coherent buffer Outs { vec4 outs[]; };
layout(set = 0, binding = 9, std430) coherent buffer Stats { vec2 stats[]; };
layout(set = 0, binding = 10, std430) coherent buffer Counters { uint counters[]; };
layout(set = 0, binding = 11, std430) readonly buffer Sinks { float sinks[]; };  // [query_heads]
layout(set = 0, binding = 12, std430) readonly buffer RowIndex { uint row_index[]; };
layout(push_constant) uniform Push {
  AttentionParams p;
  uint query_heads;  // per layer
  uint base[12];
} push;

#define ROPE push.p.rope
#define ROPE_BASE push.base[4]
#include "../rope.glsl"
#define LIST_BASE push.base[3]
#define LIST_CAPACITY push.p.list_capacity
#include "../list.glsl"

const float kLog2E = 1.44269504;  // queries are scaled by it, so that the softmax works in base 2
const float kNoPeak = -3e38;      // below every score; finite, because not every device supports infinities

const uint kUnits = (kHeadDim + 7) / 8;  // a unit is 8 channels, a uvec4 of halves
const uint kValueDim = kHeadDim - kFirstValue, kValueUnits = (kValueDim + 7) / 8;  // channels of a value

uint local_head;  // KV head that the workgroup processes, counted from the dispatch's first

// A score as input of the softmax.
float capped(float score) { return kCaps ? soft_cap(score, push.p.cap * kLog2E) : score; }

// The row of the step and the query head of a query vector.
uint row_of(uint vector) { return vector / push.p.group; }
uint query_head(uint vector) {
  return (push.p.first_head + local_head) * push.p.group + vector % push.p.group;
}
uint y_start(uint vector) { return push.base[5] + row_of(vector) * push.p.y_stride + query_head(vector) * kValueDim; }
uint ml_start(uint vector) { return push.base[6] + (row_of(vector) * push.query_heads + query_head(vector)) * 2; }

// The sink's score, which is part of a query's sum but has no value.
float sink_of(uint vector) { return sinks[push.base[10] + query_head(vector)] * kLog2E; }

// Channel c of a query, rotated and scaled.
float query_channel(uint vector, uint c, uint position) {
  const uint at = push.base[0] + row_of(vector) * push.p.row_stride + query_head(vector) * kHeadDim;
  float x = q[at + c];
  if (c < push.p.rope.n_rot) x = rotated(c, x, q[at + partner_of(c)], rope_angle(position, pair_of(c)));
  return x * query_weight(c) * (push.p.scale * kLog2E);
}

// A unit of a key or value in a row of the view; channels after the head's are zeros.
uvec4 k_unit(uint row, uint unit) {
  const uint from = local_head * push.p.view_capacity + row;
  if (kAligned) return k4[push.base[1] / 4 + from * kUnits + unit];
  const uint words = kHeadDim / 2, at = push.base[1] + from * words;
  uvec4 read = uvec4(0);
  for (uint i = 0; i < 4; ++i)
    if (unit * 4 + i < words) read[i] = k[at + unit * 4 + i];
  return read;
}
uvec4 v_unit(uint row, uint unit) {
  const uint from = local_head * push.p.view_capacity + row;
  if (kFirstValue > 0 && unit >= kValueUnits) return uvec4(0);
  if (kAligned) return v4[push.base[2] / 4 + from * kUnits + kFirstValue / 8 + unit];
  const uint words = kValueDim / 2, at = push.base[2] + from * (kHeadDim / 2) + kFirstValue / 2;
  uvec4 read = uvec4(0);
  for (uint i = 0; i < 4; ++i)
    if (unit * 4 + i < words) read[i] = v[at + unit * 4 + i];
  return read;
}

// The list index of a query's own entry; first_index is that of the first row. Any value for vectors after
// the last.
uint index_of(uint first_index, uint vector) {
  return kHasIndices ? row_index[push.base[11] + min(row_of(vector), step.n_rows - 1)] : first_index + row_of(vector);
}

// A unit of a query in halves; zeros after the last vector and the last channel.
uvec4 query_unit(uint vector, uint unit, uint first_index) {
  uvec4 words = uvec4(0);
  if (vector >= step.n_rows * push.p.group) return words;
  const uint position =
      push.p.rope.mode == kRopeList ? index_of(first_index, vector) : uint(step.position) + row_of(vector);
  for (uint w = 0; w < 4; ++w) {
    const uint c = unit * 8 + 2 * w;
    if (c < kHeadDim) words[w] = pack_halves(query_channel(vector, c, position), query_channel(vector, c + 1, position));
  }
  return words;
}

// The keys that a head's vectors from `first` to `last` see in this pass. Vectors of a row see list entries
// in (own - window, own], where `own` is the row's own entry; without a window, all entries up to it.
struct Work {
  uint count;        // entries in the list
  uint first_index;  // list index of the first row's own entry, unless kHasIndices
  // List entries that any vector sees and the view contains, if any; begin is the first of a tile
  uint begin, end;
  uint all_begin, all_end;  // entries that every vector sees
};
uint seen_end(uint first_index, uint vector) { return index_of(first_index, vector) + 1; }
uint seen_begin(uint first_index, uint vector) {
  const uint behind = seen_end(first_index, vector);
  return push.p.window > 0 && push.p.window < behind ? behind - push.p.window : 0;
}
Work work_of(uint of_head, uint first, uint last) {
  const uint head = push.p.first_head + of_head;
  Work w;
  w.count = list_count(head, step_entries(step, head_states[push.p.head_state + head]));
  w.first_index = w.count - step.n_rows;
  w.all_begin = seen_begin(w.first_index, last);
  w.all_end = seen_end(w.first_index, first);
  const uint from = push.p.first_entry, before = max(seen_begin(w.first_index, first), from) - from;
  w.begin = from + before / kKeys * kKeys;
  w.end = min(min(w.count, from + push.p.view_capacity), seen_end(w.first_index, last));
  return w;
}
uint tiles_in(Work w) { return w.begin < w.end ? (w.end - w.begin + kKeys - 1) / kKeys : 0; }
bool is_first_pass() { return push.p.first_entry == 0; }
bool is_last_pass(Work w) { return push.p.first_entry + push.p.view_capacity >= w.count; }

#include "attend_view_parts.glsl"

// A tile of keys or values passes through registers, so that it is loaded while the previous one is
// processed. Rows after the last are zeros, because a weight of 0 does not hide a NaN.
const uint kLoads = (kKeys * kUnits + kThreads - 1) / kThreads;  // units that a thread loads
uvec4 loaded[kLoads];
void load_keys(uint first, uint rows) {
  [[unroll]] for (uint l = 0; l < kLoads; ++l) {
    const uint at = gl_LocalInvocationIndex + kThreads * l, row = at / kUnits;
    loaded[l] = row < rows ? k_unit(first + row, at % kUnits) : uvec4(0);
  }
}
void load_values(uint first, uint rows) {
  [[unroll]] for (uint l = 0; l < kLoads; ++l) {
    const uint at = gl_LocalInvocationIndex + kThreads * l, row = at / kUnits;
    loaded[l] = row < rows ? v_unit(first + row, at % kUnits) : uvec4(0);
  }
}
// Stores a unit of a row in the tile.
void store_unit(uint row, uint unit, uvec4 halves);
void store_tile() {
  [[unroll]] for (uint l = 0; l < kLoads; ++l) {
    const uint at = gl_LocalInvocationIndex + kThreads * l;
    if (at < kKeys * kUnits) store_unit(at / kUnits, at % kUnits, loaded[l]);
  }
}
