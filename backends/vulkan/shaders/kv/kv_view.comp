// kv_view: copies a list's entries of pool and chunk into rows of halves, with keys rotated by list index.
#version 450
#extension GL_GOOGLE_include_directive : require
#define KV_FORMAT_ID 2
#define KV_VALUE_FORMAT_ID 4
#include "../kv_format.glsl"
#include "../step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kHeadDim = 128;
layout(constant_id = 1) const bool kHasList = false;
layout(constant_id = 3) const bool kHasValues = true;

// The runs of the window in the pool, and the chunk and the view from first_head on.
layout(set = 0, binding = 1, std430) readonly buffer PoolK { uint pool_k[]; };
layout(set = 0, binding = 2, std430) readonly buffer PoolV { uint pool_v[]; };
layout(set = 0, binding = 3, std430) readonly buffer ChunkK { uint chunk_k[]; };
layout(set = 0, binding = 4, std430) readonly buffer ChunkV { uint chunk_v[]; };
layout(set = 0, binding = 5, std430) readonly buffer List { uint list[]; };
layout(set = 0, binding = 6, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 7, std430) writeonly buffer ViewK { uint view_k[]; };
layout(set = 0, binding = 8, std430) writeonly buffer ViewV { uint view_v[]; };
layout(push_constant) uniform Push {
  KvViewParams p;
  RunWindow window;
  uint base[8];
} push;

#define ROPE push.p.rope
#define ROPE_BASE push.base[5]
#include "../rope.glsl"
#define LIST_BASE push.base[4]
#define LIST_CAPACITY push.p.list_capacity
#include "../list.glsl"

const uint kWords = kHeadDim / 2;  // per row of the view

#ifdef BLOCKS

KV_READER(pool_key, pool_k, kKvFormat)
KV_READER(chunk_key, chunk_k, kKvFormat)
KV_READER(pool_value, pool_v, kValueFormat)
KV_READER(chunk_value, chunk_v, kValueFormat)

// Where an entry is: its row in the pool or in the chunk.
struct Place {
  bool pooled;
  uint row;
};
void read_key(Place at, uint c, out vec4 first, out vec4 second) {
  const uint row = at.row * KV_ROW_WORDS(kHeadDim);
  if (at.pooled)
    pool_key_eight(push.base[0] + row, c, first, second);
  else
    chunk_key_eight(push.base[2] + row, c, first, second);
}
void read_value(Place at, uint c, out vec4 first, out vec4 second) {
  const uint row = at.row * KV_WORDS(kValueFormat, kHeadDim);
  if (at.pooled)
    pool_value_eight(push.base[1] + row, c, first, second);
  else
    chunk_value_eight(push.base[3] + row, c, first, second);
}
// The partners of the channels [c, c + 8), which rotate.
void read_partners(Place at, uint c, vec4 first, vec4 second, out vec4 first_partners, out vec4 second_partners) {
  if (push.p.rope.pairing == kRopeAdjacent) {
    first_partners = first.yxwz;
    second_partners = second.yxwz;
  } else if (rope_pairs() % 8 == 0) {
    read_key(at, partner_of(c), first_partners, second_partners);
  } else {
    first_partners = second_partners = vec4(0);
    for (uint i = 0; i < 8 && c + i < push.p.rope.n_rot; ++i) {
      vec4 low, high;
      const uint partner = partner_of(c + i);
      read_key(at, partner & ~7u, low, high);
      const float x = (partner & 4) == 0 ? low[partner & 3] : high[partner & 3];
      if (i < 4)
        first_partners[i] = x;
      else
        second_partners[i - 4] = x;
    }
  }
}
uvec4 packed(vec4 first, vec4 second) {
  return uvec4(pack_halves(first.x, first.y), pack_halves(first.z, first.w), pack_halves(second.x, second.y),
               pack_halves(second.z, second.w));
}

// A thread makes eight channels of an entry of a head.
void main() {
  const bool by_list = push.p.rope.mode == kRopeList;
  const uint kEights = kHeadDim / 8, items = push.p.heads * push.p.view_capacity * kEights;
  for (uint i = gl_GlobalInvocationID.x; i < items; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
    const uint c = i % kEights * 8, to_row = i / kEights, row = to_row % push.p.view_capacity,
               head = to_row / push.p.view_capacity, index = push.p.first_entry + row;
    const HeadState own = head_states[push.p.head_state + push.p.first_head + head];
    if (index >= list_count(push.p.first_head + head, step_entries(step, own)) || !is_in(own, push.window)) continue;
    const uint entry = list_entry(push.p.first_head + head, index);
    const bool pooled = entry < own.n_entries;
    const Place at = Place(pooled, pooled ? run_start(own, push.window) + entry
                                          : head * push.p.chunk_capacity + entry - own.n_entries);
    vec4 first, second;
    read_key(at, c, first, second);
    if (by_list && c < push.p.rope.n_rot) {
      vec4 first_partners, second_partners;
      read_partners(at, c, first, second, first_partners, second_partners);
      for (uint j = 0; j < 4; ++j) {
        if (c + j < push.p.rope.n_rot)
          first[j] = rotated(c + j, first[j], first_partners[j], rope_angle(index, pair_of(c + j)));
        if (c + 4 + j < push.p.rope.n_rot)
          second[j] = rotated(c + 4 + j, second[j], second_partners[j], rope_angle(index, pair_of(c + 4 + j)));
      }
    }
    const uvec4 key = packed(first, second);
    read_value(at, c, first, second);
    const uvec4 value = packed(first, second);
    const uint to = to_row * kWords + c / 2;
    for (uint j = 0; j < 4; ++j) {
      view_k[push.base[6] + to + j] = key[j];
      view_v[push.base[7] + to + j] = value[j];
    }
  }
}

#else

// Word i of an entry; `from` is the entry's first word in pool or chunk.
uint k_word(bool pooled, uint from, uint i) {
  return pooled ? pool_k[push.base[0] + from + i] : chunk_k[push.base[2] + from + i];
}
float k_channel(bool pooled, uint from, uint c) { return kv_channel(k_word(pooled, from, c / 2), c); }

// A workgroup makes 8 rows of the view at a time. A thread makes the same two channels of all heads, which
// have the same angles.
void main() {
  const uint kRows = 8;
  const bool by_list = push.p.rope.mode == kRopeList;
  for (uint first = gl_WorkGroupID.x * kRows; first < push.p.view_capacity; first += gl_NumWorkGroups.x * kRows)
    for (uint i = gl_LocalInvocationIndex; i < kRows * kWords; i += gl_WorkGroupSize.x) {
      const uint row = first + i / kWords, word = i % kWords, index = push.p.first_entry + row, c = 2 * word;
      if (row >= push.p.view_capacity) break;
      const bool rotates = by_list && c < push.p.rope.n_rot;  // n_rot is even
      vec2 low = vec2(1, 0), high = low;
      bool has_angles = false;
      for (uint head = 0; head < push.p.heads; ++head) {
        const HeadState own = head_states[push.p.head_state + push.p.first_head + head];
        if (index >= list_count(push.p.first_head + head, step_entries(step, own)) || !is_in(own, push.window)) continue;
        const uint entry = list_entry(push.p.first_head + head, index);
        const bool pooled = entry < own.n_entries;
        const uint from = KV_ROW_WORDS(kHeadDim) * (pooled ? run_start(own, push.window) + entry
                                                           : head * push.p.chunk_capacity + entry - own.n_entries);
        uint bits = k_word(pooled, from, word);
        if (rotates) {
          if (!has_angles) {
            low = rope_angle(index, pair_of(c));
            high = rope_angle(index, pair_of(c + 1));
            has_angles = true;
          }
          const vec2 x = kv_two(bits);
          bits = pack_halves(rotated(c, x.x, k_channel(pooled, from, partner_of(c)), low),
                             rotated(c + 1, x.y, k_channel(pooled, from, partner_of(c + 1)), high));
        } else {
          bits = kv_halves(bits);
        }
        const uint to = (head * push.p.view_capacity + row) * kWords + word;
        view_k[push.base[6] + to] = bits;
        if (!kHasValues) continue;
        view_v[push.base[7] + to] = kv_halves(pooled ? pool_v[push.base[1] + from + word] : chunk_v[push.base[3] + from + word]);
      }
    }
}

#endif
