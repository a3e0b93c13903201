// given_score: stores retention scores of all entries that the host computed.
#include <algorithm>

#include "backends/cpu/entries.h"

namespace thimble::cpu {

void given_score(const Context& ctx, const GivenScore& o) {
  const GivenScoreParams& p = o.p;
  for (uint32_t head = p.first_head; head < p.first_head + p.heads; ++head) {
    const HeadState& state = ctx.heads[p.head_state + head];
    const uint32_t n = state.n_entries;
    const float* score = data<float>(o.score);
    float* cis = in_run<float>(o.cis, state, 0);
    std::copy_n(score, n, cis);
    std::copy_n(score + n, ctx.step.n_rows,
                o.chunk_cis ? at<float>(o.chunk_cis, head, p.chunk_capacity, 0) : cis + n);
  }
}

}  // namespace thimble::cpu
