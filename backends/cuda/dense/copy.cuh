// copy: copies rows to or from the place that the step states. Host and device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

struct CopyTask {
  uint32_t row_blocks = 0, blocks = 0;  // per row, and in total
  CopyParams p{};
  const float* src = nullptr;
  float* dst = nullptr;

  CopyTask() = default;
  CopyTask(const Launch& l, const Copy& op, uint32_t threads)
      : row_blocks(static_cast<uint32_t>(ceil_div(op.p.cols, 4 * threads))),
        blocks(row_blocks * most_rows(l, op.p.rows)),
        p(op.p),
        src(data<float>(op.src)),
        dst(data<float>(op.dst)) {}

  __device__ void operator()(const StepParams& s, uint32_t block) const {
    const uint32_t row = block / row_blocks, from = p.from_logit_row ? s.first_logit_row : 0,
                   to = p.to_ring_row ? s.ring_row : 0;
    if (row >= row_count(s, p.rows)) return;
#pragma unroll 4
    for (uint32_t c = block % row_blocks * blockDim.x + threadIdx.x; c < p.cols; c += row_blocks * blockDim.x)
      dst[uint64_t(to + row) * p.dst_stride + c] = src[uint64_t(from + row) * p.src_stride + c];
  }
};

}  // namespace thimble::cuda
