// query_gate: whether this step's query is close enough to the one that made the cached selection. One workgroup.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 128;

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) buffer Cached { float cached[]; };
layout(set = 0, binding = 3, std430) buffer Gate { uint gate[]; };  // GateState, by its words:
const uint kHit = 0, kValid = 1, kGeneration = 2, kPosition = 3, kHits = 4, kMisses = 5;
layout(push_constant) uniform Push {
  QueryGateParams p;
  uint base[3];
} push;

shared vec3 subgroup_sums[kThreads / 4];  // q cached, q q, cached cached; no subgroup has fewer than four lanes
shared bool misses;

vec3 sum_of_lanes(vec3 v) { return vec3(subgroupAdd(v.x), subgroupAdd(v.y), subgroupAdd(v.z)); }

void main() {
  const uint thread = gl_LocalInvocationIndex, at = push.base[2];
  // Asked for together with the queries: one after the other they would take 0.7 us each of an H200.
  const uint valid = gate[at + kValid], generation = gate[at + kGeneration];
  const int position = int(gate[at + kPosition]);
  // The three products take the same steps in the same order, so those of equal queries have equal bits. Without a cached
  // query they are worked out for nothing.
  precise vec3 sum = vec3(0);
  const uint kEach = 4;  // of a thread that are under way at once
  for (uint first = thread; first < push.p.cols; first += kEach * kThreads) {
    float x[kEach], y[kEach];
    [[unroll]] for (uint j = 0; j < kEach; ++j) {
      const uint i = first + j * kThreads;
      x[j] = i < push.p.cols ? q[push.base[0] + i] : 0;
      y[j] = i < push.p.cols ? cached[push.base[1] + i] : 0;
    }
    [[unroll]] for (uint j = 0; j < kEach; ++j) sum += vec3(x[j] * y[j], x[j] * x[j], y[j] * y[j]);
  }
  sum = sum_of_lanes(sum);
  if (subgroupElect()) subgroup_sums[gl_SubgroupID] = sum;
  barrier();
  sum = vec3(0);
  for (uint first = 0; first < gl_NumSubgroups; first += gl_SubgroupSize) {
    const uint i = first + gl_SubgroupInvocationID;
    sum += sum_of_lanes(i < gl_NumSubgroups ? subgroup_sums[i] : vec3(0));
  }

  if (thread == 0) {
    bool hit = false;
    // More than half of the local window since the last miss: too many tokens have left it unseen.
    if (selects() && valid != 0 && generation == step.generation && step.position - position <= int(step.n_local / 2) &&
        step.theta < 1) {
      // x |x| grows with x, so this compares q cached with theta sqrt(q q * cached cached). Equal queries hit for every theta
      // below 1, zeros among them; GLSL's square root could be too large for that.
      precise const float cosine = sum.x * abs(sum.x), lowest = step.theta * abs(step.theta);
      precise const float bound = lowest * (sum.y * sum.z);
      hit = cosine >= bound || step.theta <= -1;
    }
    gate[at + kHit] = hit ? 1 : 0;
    if (!selects()) {
      gate[at + kValid] = 0;
    } else if (hit) {
      ++gate[at + kHits];
    } else {
      ++gate[at + kMisses];
      gate[at + kValid] = 1;
      gate[at + kGeneration] = step.generation;
      gate[at + kPosition] = uint(step.position);
    }
    misses = selects() && !hit;
  }
  barrier();
  if (!misses) return;
  for (uint i = thread; i < push.p.cols; i += kThreads) cached[push.base[1] + i] = q[push.base[0] + i];
}
