// cis_store: the retention scores of the step's rows, written once and never changed.
#include <algorithm>

#include "backends/cpu/entries.h"
#include "backends/hash_score.h"

namespace thimble::cpu {

void cis_store(const Context& ctx, const CisStore& o) {
  const CisStoreParams& p = o.p;
  const StepParams& s = ctx.step;
  const uint32_t columns = p.first_head + p.heads;  // columns in a row of scores
  const auto score = [&](uint32_t row, uint32_t head) {
    const int32_t position = s.position + static_cast<int32_t>(row);
    if (p.kind == kCisPosition) return static_cast<float>(position);
    if (p.kind == kCisHash)
      return hash_score(s.seed, p.layer, p.share_heads ? 0 : head, static_cast<uint32_t>(position));
    const float* scores = data<float>(o.score) + uint64_t(row) * columns;
    return p.share_heads ? *std::max_element(scores, scores + columns) : scores[head];
  };
  for (uint32_t head = p.first_head; head < columns; ++head) {
    float* cis = data<float>(o.cis) + first_row(ctx, p.into, head, p.chunk_capacity, p.head_state);
    for (uint32_t row = 0; row < s.n_rows; ++row) cis[row] = score(row, head);
  }
}

}  // namespace thimble::cpu
