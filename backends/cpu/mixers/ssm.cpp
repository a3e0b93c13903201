// ssm: Mamba-2. A worker takes some heads of a group at a time. Rows go by chunks, whose borders depend on
// the number of a row in the step alone.
#include "backends/cpu/dense/matmul.h"
#include "backends/cpu/mixer_kernels.h"
#include "backends/cpu/mixers/mixers.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {
namespace {

// With fewer rows, the chunk form is slower.
constexpr uint32_t kLeastChunk = 4;
// Heads that share the products of their group's B and C, which cost a fifth of a head's other work.
constexpr uint32_t kHeads = 4;
static_assert(kSsmScratch <= kDenseScratch);

}  // namespace

void ssm(const Context& c, const Ssm& op) {
  const SsmParams& p = op.p;
  const uint32_t rows = c.step.n_rows, of_group = p.heads / p.groups,
                 blocks = (of_group + kHeads - 1) / kHeads;
  const size_t size = size_t(p.state) * p.width, slot_stride = op.s.slot_stride / sizeof(float);
  float* const slots = data<float>(op.s.block0);
  for_share(c, p.groups * blocks, [&](uint32_t item, uint32_t worker) {
    const uint32_t group = item / blocks, first_head = group * of_group + item % blocks * kHeads;
    const uint32_t last_head = std::min(first_head + kHeads, (group + 1) * of_group);
    for (uint32_t first = 0; first < std::max(rows, 1u); first += kMixerChunk) {
      const uint32_t n = std::min(rows - first, kMixerChunk);
      const float* const xbc = data<float>(op.xbc) + size_t(first) * p.xbc_stride;
      float delta[kMixerChunk], decay[kMixerChunk];
      SsmRows r{.rows = n,
                .width = p.width,
                .state = p.state,
                .x = nullptr,
                .b = xbc + p.b_column + size_t(group) * p.state,
                .c = xbc + p.c_column + size_t(group) * p.state,
                .stride = p.xbc_stride,
                .delta = delta,
                .decay = decay,
                .d = 0,
                .before = nullptr,
                .s = nullptr,
                .y = nullptr,
                .y_stride = p.y_stride,
                .scratch = dense_scratch(c, worker)};
      if (n >= kLeastChunk) mixer_kernels().ssm_products(r);
      for (uint32_t head = first_head; head < last_head; ++head) {
        r.s = slots + c.step.state_to * slot_stride + head * size;
        r.before = r.s;
        if (first == 0)
          r.before =
              c.step.state_from == kNoState ? nullptr : slots + c.step.state_from * slot_stride + head * size;
        if (rows == 0) {
          copy_state(r.before, r.s, size);
          continue;
        }
        for (uint32_t i = 0; i < n; ++i) {
          const float dt = data<float>(op.dt)[size_t(first + i) * p.dt_stride + p.dt_column + head];
          delta[i] = softplus(dt + data<float>(op.dt_bias)[head]);
          decay[i] = delta[i] * data<float>(op.a)[head];
        }
        r.x = xbc + p.x_column + size_t(head) * p.width;
        r.d = data<float>(op.d)[head];
        r.y = data<float>(op.y) + size_t(first) * p.y_stride + size_t(head) * p.width;
        (n < kLeastChunk ? mixer_kernels().ssm_steps : mixer_kernels().ssm_chunk)(r);
      }
    }
  });
}

}  // namespace thimble::cpu
