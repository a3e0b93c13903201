// Sums and maxima over the kLanes lanes of a subgroup, all of which call them. An H200 makes 10 instructions of them and 45 of
// subgroupAdd(), which does not know that all lanes are there; and most of what a token waits for is code that it runs once.
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
