// delta_net: the gated delta rule. A worker takes one value head at a time. Rows go by chunks, whose borders
// depend on the number of a row in the step alone.
#include <cmath>

#include "backends/cpu/dense/matmul.h"
#include "backends/cpu/mixer_kernels.h"
#include "backends/cpu/mixers/mixers.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {
namespace {

// With fewer rows, the chunk form is slower.
constexpr uint32_t kLeastChunk = 8;
static_assert(kDeltaScratch <= kDenseScratch);

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

void delta_net(const Context& c, const DeltaNet& op) {
  const DeltaNetParams& p = op.p;
  const uint32_t rows = c.step.n_rows, group = p.value_heads / p.key_heads;
  const size_t size = size_t(p.width) * p.width, slot_stride = op.m.slot_stride / sizeof(float);
  float* const slots = data<float>(op.m.block0);
  for_share(c, p.value_heads, [&](uint32_t head, uint32_t worker) {
    const float* before =
        c.step.state_from == kNoState ? nullptr : slots + c.step.state_from * slot_stride + head * size;
    float* const after = slots + c.step.state_to * slot_stride + head * size;
    if (rows == 0) copy_state(before, after, size);
    const size_t key = size_t(p.tiled ? head % p.key_heads : head / group) * p.width;
    const size_t value = size_t(head) * p.width;
    const float a = data<float>(op.a)[head], dt = data<float>(op.dt)[head];
    for (uint32_t first = 0; first < rows; first += kMixerChunk) {
      const uint32_t n = std::min(rows - first, kMixerChunk);
      float gamma[kMixerChunk], beta[kMixerChunk];
      for (uint32_t i = 0; i < n; ++i) {
        const float* gates = data<float>(op.gates) + size_t(first + i) * p.gates_stride + head;
        gamma[i] = a * softplus(gates[p.alpha_column] + dt);
        beta[i] = sigmoid(gates[p.beta_column]);
      }
      const float* qkv = data<float>(op.qkv) + size_t(first) * p.qkv_stride;
      const auto kernel = n < kLeastChunk ? mixer_kernels().delta_steps : mixer_kernels().delta_chunk;
      kernel({.rows = n,
              .width = p.width,
              .q = qkv + p.q_column + key,
              .k = qkv + p.k_column + key,
              .v = qkv + p.v_column + value,
              .stride = p.qkv_stride,
              .gamma = gamma,
              .beta = beta,
              .eps = p.eps,
              .before = first ? after : before,
              .m = after,
              .y = data<float>(op.y) + size_t(first) * p.y_stride + value,
              .y_stride = p.y_stride,
              .scratch = dense_scratch(c, worker)});
    }
  });
}

}  // namespace thimble::cpu
