// query_gate: whether this step's query is close enough to the one that made the cached selection. One workgroup.
#version 450
#extension GL_GOOGLE_include_directive : require
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

shared float sums[3][kThreads];  // q cached, q q, cached cached
shared bool misses;

void main() {
  const uint thread = gl_LocalInvocationIndex;
  // The three products take the same steps in the same order, so those of equal queries have equal bits. Without a cached
  // query they are worked out for nothing.
  precise float both = 0, own = 0, other = 0;
  for (uint i = thread; i < push.p.cols; i += kThreads) {
    const float x = q[push.base[0] + i], y = cached[push.base[1] + i];
    both += x * y;
    own += x * x;
    other += y * y;
  }
  sums[0][thread] = both;
  sums[1][thread] = own;
  sums[2][thread] = other;
  barrier();
  for (uint half_size = kThreads / 2; half_size > 0; half_size /= 2) {
    if (thread < half_size)
      for (uint i = 0; i < 3; ++i) sums[i][thread] += sums[i][thread + half_size];
    barrier();
  }

  if (thread == 0) {
    const uint at = push.base[2];
    bool hit = false;
    // More than half of the local window since the last miss: too many tokens have left it unseen.
    if (selects() && gate[at + kValid] != 0 && gate[at + kGeneration] == step.generation &&
        step.position - int(gate[at + kPosition]) <= int(step.n_local / 2) && step.theta < 1) {
      // x |x| grows with x, so this compares q cached with theta sqrt(q q * cached cached). Equal queries hit for every theta
      // below 1, zeros among them; GLSL's square root could be too large for that.
      precise const float cosine = sums[0][0] * abs(sums[0][0]), lowest = step.theta * abs(step.theta);
      precise const float lengths = sums[1][0] * sums[2][0];
      precise const float bound = lowest * lengths;
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
