// query_keep: keeps the queries of the latest tokens.
#include <algorithm>

#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256, kColumns = 4;  // columns of a thread

__global__ void __launch_bounds__(kThreads)
    query_keep_kernel(const StepParams* step, QueryKeepParams p, const float* q, float* kept) {
  const StepParams s = begin_kernel(step);
  const uint32_t rows = min(s.n_rows, p.ring);
  if (blockIdx.y >= rows) return;
  const uint32_t row = s.n_rows - rows + blockIdx.y, to = (static_cast<uint32_t>(s.position) + row) % p.ring;
#pragma unroll
  for (uint32_t i = 0; i < kColumns; ++i)
    if (const uint32_t c = (blockIdx.x * kColumns + i) * kThreads + threadIdx.x; c < p.cols)
      kept[uint64_t(to) * p.cols + c] = q[uint64_t(row) * p.row_stride + c];
}

}  // namespace

void query_keep(const Launch& l, const QueryKeep& op) {
  const dim3 blocks(static_cast<uint32_t>(ceil_div(op.p.cols, kColumns * kThreads)),
                    std::min(l.max_rows, op.p.ring));
  launch(l, query_keep_kernel, blocks, kThreads, 0, l.step, op.p, data<float>(op.q), data<float>(op.kept));
}

}  // namespace thimble::cuda
