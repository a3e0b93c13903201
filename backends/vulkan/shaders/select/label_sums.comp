// label, second dispatch: the log-sum-exps. A workgroup processes 32 vectors of a KV head.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../log_sum.glsl"
#include "../soft_cap.glsl"
#include "../step.glsl"

layout(constant_id = 1) const bool kHasSinks = false;

layout(set = 0, binding = 1, std430) readonly buffer K { uint k[]; };             // the runs of the window
layout(set = 0, binding = 2, std430) readonly buffer ChunkK { uint chunk_k[]; };  // [heads][chunk_capacity][head_dim]
layout(set = 0, binding = 3, std430) readonly buffer RangeWords { uint range_words[]; };
layout(set = 0, binding = 4, std430) readonly buffer Queries { float queries[]; };
layout(set = 0, binding = 5, std430) readonly buffer Found { uint found[]; };
layout(set = 0, binding = 6, std430) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 7, std430) writeonly buffer Lse { uint lse[]; };
layout(push_constant) uniform Push {
  LabelParams p;
  RunWindow window;
  uint max_rows;
  uint first_tile;  // tile of vectors
  uint base[7];
} push;

#define K_BASE push.base[0]
#define RANGE_BASE push.base[2]
#define QUERIES_BASE push.base[3]
#define FOUND_BASE push.base[4]
#include "label.glsl"

#ifdef BLOCKS
KV_READER(chunk, chunk_k, kKvFormat)
#else
vec2 chunk_two(uint row, uint c) { return kv_two(chunk_k[row + c / 2]); }
#endif
void load_chunk_keys(uint head, uint row, uint n, uint slab) {
  const uint start = push.base[1] + (head * push.p.chunk_capacity + row) * KV_ROW_WORDS(kHeadDim);
  for (uint i = gl_LocalInvocationIndex; i < kKeys * kSlab / 2; i += 128) {
    const uint key = i / (kSlab / 2), word = slab / 2 + i % (kSlab / 2);
    const bool there = key < n && word < kHeadDim / 2;
    put_two(i, there ? chunk_two(start + key * KV_ROW_WORDS(kHeadDim), 2 * word) : vec2(0));
  }
}

void main() {
  const uint head = gl_WorkGroupID.y, first = (push.first_tile + gl_WorkGroupID.x) * kVectors;
  const uint group = push.p.group, vectors = marked_rows() * group;
  const HeadState state = head_states[push.p.head_state + head];
  if (first >= vectors || !is_in(state, push.window)) return;
  const Range r = range_of(state);
  uint visible[4];  // entries that a vector sees; those of the chunk follow those of the pool
  LogSum sums[4];
  [[unroll]] for (uint j = 0; j < 4; ++j) {
    const uint vector = first + own_vector(j);
    visible[j] = vector < vectors ? state.n_entries + marked_row(vector / group) + 1 : 0;
    sums[j] = kNoSum;
  }
  // Sinks, labelled entries, entries after the text, chunk.
  const uvec4 begins = uvec4(0, r.first, r.own, state.n_entries),
              ends = uvec4(r.sinks, r.end, state.n_entries, state.n_entries + step.n_rows);
  for (uint part = 0; part < 4; ++part)
    for (uint entry = begins[part]; entry < ends[part]; entry += kKeys) {
      const uint n = min(kKeys, ends[part] - entry);
      vec4 z[4];
      [[unroll]] for (uint j = 0; j < 4; ++j) z[j] = vec4(0);
      for (uint slab = 0; slab < kHeadDim; slab += kSlab) {
        load_vectors(head, first, vectors, slab);
        if (part < 3)
          load_keys(state, entry, n, slab);
        else
          load_chunk_keys(head, entry - state.n_entries, n, slab);
        multiply_slab(z);
      }
      cap_logits(z);
      [[unroll]] for (uint j = 0; j < 4; ++j) {
        const uint seen = visible[j] > entry ? min(n, visible[j] - entry) : 0;
        uint count = 0;
        [[unroll]] for (uint i = 0; i < 4; ++i) count += own_key(i) < seen ? 1 : 0;
        if (count > 0) sums[j] = added(sums[j], z[j], count);
      }
    }
  // Combine the sums of the 16 threads that share a vector, in order.
  [[unroll]] for (uint j = 0; j < 4; ++j) {
    of_vectors[own_vector(j) * 16 + own_key(0)] = sums[j].peak;
    of_keys[own_vector(j) * 16 + own_key(0)] = sums[j].sum;
  }
  barrier();
  const uint own = gl_LocalInvocationIndex, vector = first + own;
  if (own >= kVectors || vector >= vectors) return;
  const uint query = head * group + vector % group, index = vector / group;
  LogSum sum = kNoSum;
  if (kHasSinks) sum = added(sum, sinks[push.base[5] + query]);
  for (uint i = 0; i < 16; ++i) sum = added(sum, LogSum(of_vectors[own * 16 + i], of_keys[own * 16 + i]));
  lse[push.base[6] + marked_row(index) * push.p.heads * group + query] =
      sum.sum > 0 ? floatBitsToUint(sum.peak + log(sum.sum) + log_length(index)) : kMinusInfinity;
}
