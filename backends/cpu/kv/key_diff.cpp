// key_diff: how unlike the mean of all keys each key is. Unit keys are added in blocks of entries, and the
// blocks in order; the sum points where the mean does.
#include <algorithm>
#include <cmath>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_scratch.h"

namespace thimble::cpu {
namespace {

float dot(const float* a, const float* b, uint32_t n) {
  float sum = 0;
  for (uint32_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}

}  // namespace

void key_diff(const Context& ctx, const KeyDiff& o) {
  const KeyDiffParams& p = o.p;
  const uint32_t dh = p.head_dim;
  // Calls work(head, its run, block, first entry, end, scratch) for all blocks of all heads.
  const auto for_blocks = [&](const auto& work) {
    uint32_t most = 0;  // of one head
    for (uint32_t head = p.first_head; head < p.first_head + p.heads; ++head)
      most = std::max(most, units(step_entries(ctx.step, ctx.heads[p.head_state + head]), kKeyDiffBlock));
    ctx.threads.run(p.heads * most, [&](uint32_t item, uint32_t worker) {
      const uint32_t head = p.first_head + item / most, block = item % most;
      const HeadState& state = ctx.heads[p.head_state + head];
      const uint32_t begin = block * kKeyDiffBlock,
                     end = std::min(begin + kKeyDiffBlock, step_entries(ctx.step, state));
      if (begin < end)
        work(head, state, block, begin, end, worker_scratch<KeyScratch>(ctx.scratch.data(), worker, dh));
    });
  };
  const KvRows pool(o.k, dh), chunk(o.chunk_k, dh);
  const auto read_key = [&](uint32_t head, const HeadState& state, uint32_t entry, float* key) {
    const uint32_t n = state.n_entries;
    const KvRows& rows = entry < n ? pool : chunk;
    rows.format.load_row(entry < n ? rows.in_run(state, entry) : rows.at(head, p.chunk_capacity, entry - n),
                         key, dh);
  };

  for_blocks([&](uint32_t head, const HeadState& state, uint32_t block, uint32_t begin, uint32_t end,
                 const KeyScratch& t) {
    float* sum = at<float>(o.sums, head, p.blocks, block, dh);
    std::fill_n(sum, dh, 0.0f);
    for (uint32_t entry = begin; entry < end; ++entry) {
      read_key(head, state, entry, t.key);
      const float inverse = 1 / std::sqrt(dot(t.key, t.key, dh));
      if (!std::isfinite(inverse)) continue;
      for (uint32_t c = 0; c < dh; ++c) sum[c] += inverse * t.key[c];
    }
  });
  for_blocks([&](uint32_t head, const HeadState& state, uint32_t, uint32_t begin, uint32_t end,
                 const KeyScratch& t) {
    std::fill_n(t.sum, dh, 0.0f);
    for (uint32_t block = 0; block < units(step_entries(ctx.step, state), kKeyDiffBlock); ++block) {
      const float* sum = at<float>(o.sums, head, p.blocks, block, dh);
      for (uint32_t c = 0; c < dh; ++c) t.sum[c] += sum[c];
    }
    const float squares = dot(t.sum, t.sum, dh);
    for (uint32_t entry = begin; entry < end; ++entry) {
      read_key(head, state, entry, t.key);
      const float product = squares * dot(t.key, t.key, dh);
      float& score = entry < state.n_entries
                         ? *in_run<float>(o.cis, state, entry)
                         : *at<float>(o.chunk_cis, head, p.chunk_capacity, entry - state.n_entries);
      score = product == 0 ? -1.0f : -dot(t.key, t.sum, dh) / std::sqrt(product);
    }
  });
}

}  // namespace thimble::cpu
