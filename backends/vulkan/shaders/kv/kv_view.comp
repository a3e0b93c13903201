// kv_view: copies a list's entries of pool and chunk into rows of halves, with keys rotated by list index.
#version 450
#extension GL_GOOGLE_include_directive : require
#define KV_FORMAT_ID 2
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
