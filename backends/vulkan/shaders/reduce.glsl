// Sums and maxima over a workgroup of at most kThreads threads, a constant of the includer. All threads must
// call these, and all get the result.

shared float subgroup_results[kThreads / 4];  // subgroups have at least four lanes

// Makes each subgroup's result visible to all threads, until the next call.
void share_result(float result) {
  barrier();  // the previous results are no longer read
  if (subgroupElect()) subgroup_results[gl_SubgroupID] = result;
  barrier();
}

float group_sum(float x) {
  share_result(subgroupAdd(x));
  float sum = 0;
  for (uint i = 0; i < gl_NumSubgroups; ++i) sum += subgroup_results[i];
  return sum;
}
float group_max(float x) {
  share_result(subgroupMax(x));
  float largest = subgroup_results[0];
  for (uint i = 1; i < gl_NumSubgroups; ++i) largest = max(largest, subgroup_results[i]);
  return largest;
}
