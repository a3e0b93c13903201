// Sums over the threads of a workgroup, in an order that goes subgroup by subgroup. The shader that includes this defines the
// constant kThreads, its workgroup's size, a multiple of the subgroup size.
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_ballot : require

// This thread's place in the order.
uint thread_in_order() { return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID; }

shared uint subgroup_sums[kThreads / 4];  // no subgroup has fewer than four lanes

// The numbers of the subgroups before this one added up, and those of all. All threads must call these.
uvec2 scan_subgroups(uint of_subgroup) {
  barrier();  // all have read what was there
  if (subgroupElect()) subgroup_sums[gl_SubgroupID] = of_subgroup;
  barrier();
  uvec2 sums = uvec2(0);
  for (uint first = 0; first < gl_NumSubgroups; first += gl_SubgroupSize) {
    const uint i = first + gl_SubgroupInvocationID, sum = i < gl_NumSubgroups ? subgroup_sums[i] : 0;
    sums += uvec2(subgroupAdd(i < gl_SubgroupID ? sum : 0), subgroupAdd(sum));
  }
  return sums;
}
// The same for the threads before this one.
uvec2 scan_threads(uint of_thread) {
  const uvec2 sums = scan_subgroups(subgroupAdd(of_thread));
  return uvec2(sums.x + subgroupExclusiveAdd(of_thread), sums.y);
}
