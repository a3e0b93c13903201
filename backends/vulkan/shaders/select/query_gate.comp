// query_gate: whether this step's query is close enough to the query that made the cached selection. One
// workgroup.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_ballot : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "../step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 128;  // a multiple of kLanes
layout(constant_id = 1) const uint kLanes = 32;     // lanes per subgroup

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) buffer Cached { float cached[]; };
// GateState, with the offsets of its words:
layout(set = 0, binding = 3, std430) buffer Gate { uint gate[]; };
const uint kHit = 0, kValid = 1, kGeneration = 2, kPosition = 3, kHits = 4, kMisses = 5, kSelecting = 6;
layout(push_constant) uniform Push {
  QueryGateParams p;
  uint base[3];
} push;

const uint kSubgroups = kThreads / kLanes;
shared vec3 subgroup_sums[kSubgroups];  // q cached, q q, cached cached
shared bool is_miss;

// The three sums add in the same order, so those of equal queries have equal bits. Loops are not unrolled,
// because most of a token's time is spent loading code that runs once.
vec3 with_products(vec3 sum, float x, float y) {
  precise const vec3 s = vec3(fma(x, y, sum.x), fma(x, x, sum.y), fma(y, y, sum.z));
  return s;
}
vec3 sum_of_lanes(vec3 v) {
  precise vec3 sum = v;
  [[dont_unroll]] for (uint apart = 1; apart < kLanes; apart *= 2)
    sum += vec3(subgroupShuffleXor(sum.x, apart), subgroupShuffleXor(sum.y, apart), subgroupShuffleXor(sum.z, apart));
  return sum;
}

// The number of KV heads that are selected from.
uint count_selecting() {
  uint count = 0;
  [[dont_unroll]] for (uint first = 0; first < push.p.heads; first += kLanes) {
    const uint head = first + gl_SubgroupInvocationID;
    const HeadState state = head_states[push.p.head_state + min(head, push.p.heads - 1)];
    const uvec4 all = subgroupBallot(head < push.p.heads && selects(step, step_entries(step, state)));
    count += subgroupBallotBitCount(all);
  }
  return count;
}

void main() {
  const uint thread = gl_SubgroupID * kLanes + gl_SubgroupInvocationID, at = push.base[2];
  // The state and the step are loaded together with the queries. One after the other, each would take 0.7 us
  // on an H200.
  const uint hits = gate[at + kHits], misses = gate[at + kMisses];
  const uint selecting = count_selecting();
  const float theta = step.theta;
  const uint generation = step.generation;
  const int position = step.position;
  // Miss if more than half of the local window passed since the last miss: too many tokens left the window
  // without having been candidates.
  const bool may_hit = selecting > 0 && gate[at + kValid] != 0 && gate[at + kGeneration] == generation &&
                       gate[at + kSelecting] == selecting && position - int(gate[at + kPosition]) <= int(step.n_local / 2) && theta < 1;
  // Without a cached query the products are computed in vain.
  vec3 sum = vec3(0);
  const uint kEach = 4;  // loads per thread in flight at once
  [[dont_unroll]] for (uint first = 0; first < push.p.cols; first += kEach * kThreads) {
    float x[kEach], y[kEach];
    [[unroll]] for (uint j = 0; j < kEach; ++j) {
      const uint i = first + j * kThreads + thread;
      x[j] = i < push.p.cols ? q[push.base[0] + i] : 0;
      y[j] = i < push.p.cols ? cached[push.base[1] + i] : 0;
    }
    [[unroll]] for (uint j = 0; j < kEach; ++j) sum = with_products(sum, x[j], y[j]);
  }
  sum = sum_of_lanes(sum);
  if (gl_SubgroupInvocationID == 0) subgroup_sums[gl_SubgroupID] = sum;
  barrier();
  precise vec3 of_subgroups = vec3(0);
  [[dont_unroll]] for (uint first = 0; first < kSubgroups; first += kLanes) {
    const uint i = first + gl_SubgroupInvocationID;
    of_subgroups += i < kSubgroups ? subgroup_sums[i] : vec3(0);
  }
  sum = sum_of_lanes(of_subgroups);

  if (thread == 0) {
    // x |x| is monotonic in x, so this compares q cached with theta sqrt(q q * cached cached). Equal queries,
    // including all-zero ones, hit for every theta below 1; GLSL's square root could be too large for that.
    precise const float cosine = sum.x * abs(sum.x), lowest = theta * abs(theta);
    precise const float bound = lowest * (sum.y * sum.z);
    const bool hit = may_hit && (cosine >= bound || theta <= -1);
    gate[at + kHit] = hit ? 1 : 0;
    gate[at + kValid] = selecting > 0 ? 1 : 0;
    is_miss = selecting > 0 && !hit;
    if (hit) gate[at + kHits] = hits + 1;
    if (is_miss) {
      gate[at + kMisses] = misses + 1;
      gate[at + kGeneration] = generation;
      gate[at + kPosition] = uint(position);
      gate[at + kSelecting] = selecting;
    }
  }
  barrier();
  if (!is_miss) return;
  // This data was just read, so it is in the cache.
  [[dont_unroll]] for (uint i = thread; i < push.p.cols; i += kThreads) cached[push.base[1] + i] = q[push.base[0] + i];
}
