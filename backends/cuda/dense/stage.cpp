#include "backends/cuda/ops.h"

namespace thimble::cuda {

// The copies' stream begins where the kernels' stream is now. The stream waits for the copies at the end of
// the segment.
void stage(const Launch& l, const Stage& op) {
  const auto add = [&](cudaError_t e) {
    if (*l.error == cudaSuccess) *l.error = e;
  };
  add(cudaEventRecord(l.crossing, l.stream));
  add(cudaStreamWaitEvent(l.copies, l.crossing, 0));
  add(cudaMemcpyAsync(data<std::byte>(op.to), data<std::byte>(op.from), op.from.bytes, cudaMemcpyDefault,
                      l.copies));
}

}  // namespace thimble::cuda
