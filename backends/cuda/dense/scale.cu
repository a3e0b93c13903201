#include "backends/cuda/ops.h"
#include "backends/cuda/soft_cap.cuh"

namespace thimble::cuda {

static constexpr uint32_t kThreads = 256;

// `positions`: of the rows; null if they are consecutive.
static __global__ void scale_kernel(const StepParams* step, ScaleParams p, const float* x, float* y,
                                    const int32_t* positions) {
  begin_kernel();
  const uint32_t row = blockIdx.y, col = blockIdx.x * kThreads + threadIdx.x;
  if (row >= row_count(*step, p.rows) || col >= p.cols) return;
  float scale = p.scale;
  if (p.growth != 0) {
    const uint32_t position = positions ? positions[row] : step->position + row;
    scale *= 1 + p.growth * logf(static_cast<float>(1 + position / p.period));
  }
  const uint64_t at = uint64_t(row) * p.row_stride + col;
  float scaled = scale * x[at];
  if (p.cap != 0) scaled = soft_cap(scaled, p.cap);
  y[at] = p.add ? y[at] + scaled : scaled;
}

void scale(const Launch& l, const Scale& op) {
  const dim3 blocks(static_cast<uint32_t>(ceil_div(op.p.cols, kThreads)), most_rows(l, op.p.rows));
  launch(l, scale_kernel, blocks, kThreads, 0, l.step, op.p, data<float>(op.x), data<float>(op.y),
         data<int32_t>(op.positions));
}

}  // namespace thimble::cuda
