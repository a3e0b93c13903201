// score_mix: adds two scores of a head's entries, each standardised over the entries that an eviction chooses
// from.
#include <cmath>

#include "backends/cpu/entries.h"

namespace thimble::cpu {
namespace {

struct Standard {
  float mean = 0, inverse = 0;  // 1 / deviation; 0 where that is 0
  float of(float x) const { return (x - mean) * inverse; }
};

// The mean and the inverse deviation of the finite ones of score(i), for i in [begin, end).
template <typename Score>
Standard standard(uint32_t begin, uint32_t end, const Score& score) {
  double sum = 0, squares = 0, count = 0;
  for (uint32_t i = begin; i < end; ++i) {
    if (!std::isfinite(score(i))) continue;
    sum += score(i);
    ++count;
  }
  if (count == 0) return {};
  const double mean = sum / count;
  for (uint32_t i = begin; i < end; ++i) {
    if (!std::isfinite(score(i))) continue;
    const double off = score(i) - mean;
    squares += off * off;
  }
  const float deviation = static_cast<float>(std::sqrt(squares / count));
  return {static_cast<float>(mean), deviation > 0 ? 1 / deviation : 0};
}

}  // namespace

void score_mix(const Context& ctx, const ScoreMix& o) {
  const ScoreMixParams& p = o.p;
  ctx.threads.run(p.heads, [&](uint32_t item, uint32_t) {
    const uint32_t head = p.first_head + item;
    const HeadState& state = ctx.heads[p.head_state + head];
    const uint32_t entries = step_entries(ctx.step, state);
    if (state.keep >= entries) return;
    const auto entry = [&](const View& pool, const View& chunk, uint32_t i) -> float& {
      return i < state.n_entries ? *in_run<float>(pool, state, i)
                                 : *at<float>(chunk, head, p.chunk_capacity, i - state.n_entries);
    };
    const auto score = [&](uint32_t i) { return entry(o.scores, o.chunk_scores, i); };
    const auto mixed = [&](uint32_t i) -> float& { return entry(o.mixed, o.chunk_mixed, i); };
    const Regions r = kept_regions(state, entries);
    const Standard a = standard(r.begin, r.end, score), b = standard(r.begin, r.end, mixed);
    for (uint32_t i = r.begin; i < r.end; ++i) mixed(i) = a.of(score(i)) + b.of(mixed(i));
  });
}

}  // namespace thimble::cpu
