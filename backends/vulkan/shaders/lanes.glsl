// Sums and maxima over the kLanes lanes of a subgroup; all lanes call them. An H200 takes 10 instructions for
// these and 45 for subgroupAdd(), which cannot assume that all lanes are active. Most of a token's time is
// spent loading code that runs once.
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_shuffle : require

float sum_of_lanes(float x) {
  [[unroll]] for (uint apart = 1; apart < kLanes; apart *= 2) x += subgroupShuffleXor(x, apart);
  return x;
}
float max_of_lanes(float x) {
  [[unroll]] for (uint apart = 1; apart < kLanes; apart *= 2) x = max(x, subgroupShuffleXor(x, apart));
  return x;
}
