// Which of the workgroups that share a result is the last one, and so puts together what all of them wrote to `coherent`
// buffers. The shader that includes this has declared `uint counters[]`, zeros; it leaves zeros.

shared bool is_last;

// All threads call it, once what they wrote for the last one is written.
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
