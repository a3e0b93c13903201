// given_score: stores retention scores of all entries that the host computed.
#include <algorithm>

#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256;

// `heads`: from KV head 0 of the layer on.
__global__ void given_score_kernel(const StepParams* step, const HeadState* heads, GivenScoreParams p,
                                   const float* score, float* cis, float* chunk_cis) {
  const StepParams s = begin_kernel(step);
  const uint32_t head = p.first_head + blockIdx.y;
  const HeadState state = heads[head];
  const uint32_t n = step_entries(s, state);
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < n; i += gridDim.x * kThreads) {
    if (i < state.n_entries || !chunk_cis)
      cis[uint64_t(state.first) + i] = score[i];
    else
      chunk_cis[uint64_t(head) * p.chunk_capacity + i - state.n_entries] = score[i];
  }
}

}  // namespace

void given_score(const Launch& l, const GivenScore& op) {
  const uint64_t scores = op.score.bytes / sizeof(float);
  const uint32_t blocks =
      static_cast<uint32_t>(std::clamp<uint64_t>(ceil_div(scores, kThreads), 1, l.card.multiprocessors));
  launch(l, given_score_kernel, dim3(blocks, op.p.heads), kThreads, 0, l.step, l.heads + op.p.head_state,
         op.p, data<float>(op.score), data<float>(op.cis), data<float>(op.chunk_cis));
}

}  // namespace thimble::cuda
