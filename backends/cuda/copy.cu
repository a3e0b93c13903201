#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {

static __global__ void copy_kernel(const StepParams* step, CopyParams p, const float* src, float* dst) {
  begin_kernel();
  const uint32_t row = blockIdx.y, from = p.from_logit_row ? step->first_logit_row : 0,
                 to = p.to_ring_row ? step->ring_row : 0;
  if (row >= row_count(*step, p.rows)) return;
  for (uint32_t c = blockIdx.x * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.x * blockDim.x)
    dst[uint64_t(to + row) * p.dst_stride + c] = src[uint64_t(from + row) * p.src_stride + c];
}

void copy(const Launch& l, const Copy& op) {
  const dim3 blocks(static_cast<uint32_t>(ceil_div(op.p.cols, 1024)), most_rows(l, op.p.rows));
  launch(l, copy_kernel, blocks, 256, 0, l.step, op.p, data<float>(op.src), data<float>(op.dst));
}

}  // namespace thimble::cuda
