// cis_store: the retention scores of the step's rows, written once and never changed.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"
#include "backends/hash_score.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 128;

// `heads`: from KV head 0 of the layer on.
__global__ void cis_store_kernel(const StepParams* step, const HeadState* heads, CisStoreParams p,
                                 const float* score, float* cis) {
  const StepParams s = begin_kernel(step);
  const uint32_t row = blockIdx.x * kThreads + threadIdx.x, head = p.first_head + blockIdx.y;
  if (row >= s.n_rows) return;
  const HeadState state = heads[head];
  const uint64_t behind = uint64_t(state.first) + state.n_entries,
                 first = p.into == kIntoPool   ? behind
                         : p.into == kIntoRing ? behind - s.n_rows
                                               : uint64_t(head) * p.chunk_capacity;
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
  cis[first + row] = value;
}

}  // namespace

void cis_store(const Launch& l, const CisStore& op) {
  const dim3 blocks(static_cast<uint32_t>(ceil_div(l.max_rows, kThreads)), op.p.heads);
  launch(l, cis_store_kernel, blocks, kThreads, 0, l.step, l.heads + op.p.head_state, op.p,
         data<float>(op.score), data<float>(op.cis));
}

}  // namespace thimble::cuda
