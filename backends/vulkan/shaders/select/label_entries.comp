// label, third dispatch: the labels. A workgroup processes 64 entries of a KV head with all vectors.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../soft_cap.glsl"
#include "../step.glsl"

layout(constant_id = 1) const bool kHasWorth = false;

layout(set = 0, binding = 1, std430) readonly buffer K { uint k[]; };  // the runs of the window
layout(set = 0, binding = 2, std430) readonly buffer RangeWords { uint range_words[]; };
layout(set = 0, binding = 3, std430) readonly buffer Queries { float queries[]; };
layout(set = 0, binding = 4, std430) readonly buffer Found { uint found[]; };
layout(set = 0, binding = 5, std430) readonly buffer Lse { float lse[]; };
layout(set = 0, binding = 6, std430) readonly buffer Worth { float worth[]; };
layout(set = 0, binding = 7, std430) buffer MaxLogit { float max_logit[]; };
layout(set = 0, binding = 8, std430) buffer LogProb { float log_prob[]; };
layout(push_constant) uniform Push {
  LabelParams p;
  RunWindow window;
  uint max_rows;
  uint first_tile;  // tile of entries
  uint base[8];
} push;

#define K_BASE push.base[0]
#define RANGE_BASE push.base[1]
#define QUERIES_BASE push.base[2]
#define FOUND_BASE push.base[3]
#include "label.glsl"

// The larger value; a NaN is ignored.
float larger(float a, float b) { return b > a ? b : a; }

void main() {
  const uint head = gl_WorkGroupID.y, group = push.p.group, vectors = marked_rows() * group;
  const HeadState state = head_states[push.p.head_state + head];
  if (vectors == 0 || !is_in(state, push.window)) return;
  const Range r = range_of(state);
  const uint entry = r.first + (push.first_tile + gl_WorkGroupID.x) * kKeys;
  if (entry >= r.end) return;
  const uint n = min(kKeys, r.end - entry);
  vec4 best_logit = vec4(push.p.least), best_log = best_logit;
  for (uint first = 0; first < vectors; first += kVectors) {
    vec4 z[4];
    [[unroll]] for (uint j = 0; j < 4; ++j) z[j] = vec4(0);
    for (uint slab = 0; slab < kHeadDim; slab += kSlab) {
      load_vectors(head, first, vectors, slab);
      load_keys(state, entry, n, slab);
      multiply_slab(z);
    }
    cap_logits(z);
    [[unroll]] for (uint j = 0; j < 4; ++j) {
      const uint vector = first + own_vector(j);
      if (vector >= vectors) continue;
      const uint query = head * group + vector % group;
      const float sum = lse[push.base[4] + marked_row(vector / group) * push.p.heads * group + query];
      [[unroll]] for (uint i = 0; i < 4; ++i) {
        float more = 0;
        if (kHasWorth && own_key(i) < n)
          more = worth[push.base[5] + query * push.p.label_capacity + entry + own_key(i)];
        best_logit[i] = larger(best_logit[i], z[j][i]);
        best_log[i] = larger(best_log[i], z[j][i] - sum + more);
      }
    }
  }
  // Combine the values of the 8 threads that share a key.
  const uint sharer = gl_LocalInvocationIndex / 16;
  [[unroll]] for (uint i = 0; i < 4; ++i) {
    of_vectors[sharer * kKeys + own_key(i)] = best_logit[i];
    of_keys[sharer * kKeys + own_key(i)] = best_log[i];
  }
  barrier();
  const uint own = gl_LocalInvocationIndex;
  if (own >= n) return;
  const uint at = head * push.p.label_capacity + entry + own;
  float logit = max_logit[push.base[6] + at], of_log = log_prob[push.base[7] + at];
  for (uint i = 0; i < 8; ++i) {
    logit = larger(logit, of_vectors[i * kKeys + own]);
    of_log = larger(of_log, of_keys[i * kKeys + own]);
  }
  max_logit[push.base[6] + at] = logit;
  log_prob[push.base[7] + at] = of_log;
}
