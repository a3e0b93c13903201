// cis_store: the retention scores of the step's rows, written once and never changed.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"
#include "backends/hash_score.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 128;

__global__ void cis_store_kernel(const StepParams* step, CisStoreParams p, const float* score, float* cis) {
  begin_kernel();
  const StepParams& s = *step;
  const uint32_t row = blockIdx.x * kThreads + threadIdx.x, head = p.first_head + blockIdx.y;
  if (row >= s.n_rows) return;
  const uint32_t first = p.into == kIntoPool ? s.n_entries : p.into == kIntoRing ? s.n_entries - s.n_rows : 0;
  const int32_t position = s.position + static_cast<int32_t>(row);
  float value;
  if (p.kind == kCisPosition) {
    value = static_cast<float>(position);
  } else if (p.kind == kCisHash) {
    value = hash_score(s.seed, p.layer, p.share_heads ? 0 : head, static_cast<uint32_t>(position));
  } else {
    const uint32_t columns = p.first_head + p.heads;
    const float* scores = score + uint64_t(row) * columns;
    value = scores[p.share_heads ? 0 : head];
    if (p.share_heads)
      for (uint32_t other = 1; other < columns; ++other)
        if (value < scores[other]) value = scores[other];
  }
  cis[uint64_t(head) * p.capacity + first + row] = value;
}

}  // namespace

void cis_store(const Launch& l, const CisStore& op) {
  const dim3 blocks(static_cast<uint32_t>(ceil_div(l.max_rows, kThreads)), op.p.heads);
  launch(l, cis_store_kernel, blocks, kThreads, 0, l.step, op.p, data<float>(op.score), data<float>(op.cis));
}

}  // namespace thimble::cuda
