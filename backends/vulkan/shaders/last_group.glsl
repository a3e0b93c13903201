// Finds out which of the workgroups that share a result finishes last; that one combines what all of them
// wrote to `coherent` buffers. The includer has declared `uint counters[]`, which must be zeros and are zeros
// again afterwards.

shared bool is_last;

// All threads call this after they have written their results for the last workgroup.
bool finishes_last(uint counter, uint groups) {
  memoryBarrierBuffer();
  barrier();
  if (gl_LocalInvocationIndex == 0) {
    is_last = atomicAdd(counters[counter], 1) == groups - 1;
    if (is_last) counters[counter] = 0;
  }
  barrier();
  memoryBarrierBuffer();
  return is_last;
}
