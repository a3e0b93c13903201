// Prefix sums over the threads of a workgroup, in subgroup order. The includer defines the constant kThreads,
// the size of its workgroup, a multiple of the subgroup size.
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_ballot : require

// This thread's index in that order.
uint thread_in_order() { return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID; }

shared uint subgroup_sums[kThreads / 4];  // subgroups have at least four lanes

// The sum over the subgroups before this one, and the total. All threads must call these.
uvec2 scan_subgroups(uint of_subgroup) {
  barrier();  // the previous sums are no longer read
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
