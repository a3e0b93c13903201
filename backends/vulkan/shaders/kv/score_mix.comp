// score_mix: adds two standardised scores of a head's entries. A workgroup processes a head. It reads the scores three times:
// for the means, for the deviations, and for the sums.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#include "../step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 128;  // a multiple of kLanes
layout(constant_id = 1) const uint kLanes = 32;     // of a subgroup
#include "../lanes.glsl"

layout(set = 0, binding = 1, std430) readonly buffer Scores { float scores[]; };
layout(set = 0, binding = 2, std430) readonly buffer ChunkScores { float chunk_scores[]; };
layout(set = 0, binding = 3, std430) buffer Mixed { float mixed[]; };
layout(set = 0, binding = 4, std430) buffer ChunkMixed { float chunk_mixed[]; };
layout(push_constant) uniform Push {
  ScoreMixParams p;
  uint base[4];
} push;

const uint kSubgroups = kThreads / kLanes;
shared vec2 sums[kSubgroups];

// The sums of both over all threads, which all call it: lanes of a subgroup, then subgroups in order.
vec2 group_sum(vec2 x) {
  x = vec2(sum_of_lanes(x.x), sum_of_lanes(x.y));
  barrier();  // all threads have read the last call's sums
  if (gl_SubgroupInvocationID == 0) sums[gl_SubgroupID] = x;
  barrier();
  vec2 sum = vec2(0);
  for (uint i = 0; i < kSubgroups; ++i) sum += sums[i];
  return sum;
}

bool is_finite(float x) { return (floatBitsToUint(x) & 0x7f800000u) != 0x7f800000u; }

float inverse_deviation(float squares, float count) {
  const float deviation = count > 0 ? sqrt(squares / count) : 0;
  return deviation > 0 ? 1 / deviation : 0;
}

void main() {
  const uint head = push.p.first_head + gl_WorkGroupID.x;
  const HeadState own = head_states[push.p.head_state + head];
  const uint entries = step_entries(step, own);
  if (own.keep >= entries) return;
  const Regions r = kept_regions(own, entries);
  const uint begin = r.begin + gl_LocalInvocationIndex, chunk = head * push.p.chunk_capacity;

  vec2 sum = vec2(0), count = vec2(0), squares = vec2(0);
  for (uint i = begin; i < r.end; i += kThreads) {
    const bool pooled = i < own.n_entries;
    const uint at = pooled ? own.first + i : chunk + i - own.n_entries;
    const float a = pooled ? scores[push.base[0] + at] : chunk_scores[push.base[1] + at];
    const float b = pooled ? mixed[push.base[2] + at] : chunk_mixed[push.base[3] + at];
    if (is_finite(a)) sum.x += a, ++count.x;
    if (is_finite(b)) sum.y += b, ++count.y;
  }
  sum = group_sum(sum);
  count = group_sum(count);
  const vec2 mean = vec2(count.x > 0 ? sum.x / count.x : 0, count.y > 0 ? sum.y / count.y : 0);
  for (uint i = begin; i < r.end; i += kThreads) {
    const bool pooled = i < own.n_entries;
    const uint at = pooled ? own.first + i : chunk + i - own.n_entries;
    const float a = pooled ? scores[push.base[0] + at] : chunk_scores[push.base[1] + at];
    const float b = pooled ? mixed[push.base[2] + at] : chunk_mixed[push.base[3] + at];
    if (is_finite(a)) squares.x += (a - mean.x) * (a - mean.x);
    if (is_finite(b)) squares.y += (b - mean.y) * (b - mean.y);
  }
  squares = group_sum(squares);
  const vec2 inverse = vec2(inverse_deviation(squares.x, count.x), inverse_deviation(squares.y, count.y));
  for (uint i = begin; i < r.end; i += kThreads) {
    const bool pooled = i < own.n_entries;
    const uint at = pooled ? own.first + i : chunk + i - own.n_entries;
    const float a = pooled ? scores[push.base[0] + at] : chunk_scores[push.base[1] + at];
    const float b = pooled ? mixed[push.base[2] + at] : chunk_mixed[push.base[3] + at];
    const float both = (a - mean.x) * inverse.x + (b - mean.y) * inverse.y;
    if (pooled)
      mixed[push.base[2] + at] = both;
    else
      chunk_mixed[push.base[3] + at] = both;
  }
}
