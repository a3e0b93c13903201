// cis_store: the retention scores of the step's rows, written once and never changed.
#include <algorithm>

#include "backends/cpu/entries.h"

namespace thimble::cpu {

// A permutation of the 32-bit numbers in which every input bit changes every output bit about half of the
// time.
static uint32_t mix(uint32_t x) {
  x += 0x9e3779b9u;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Uniform in [0, 1), a multiple of 2^-24. Every backend computes these bits.
static float hash_score(uint32_t seed, uint32_t layer, uint32_t head, uint32_t position) {
  const uint32_t bits = mix(mix(mix(mix(seed) ^ layer) ^ head) ^ position);
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

void cis_store(const Context& ctx, const CisStore& o) {
  const CisStoreParams& p = o.p;
  const StepParams& s = ctx.step;
  const uint32_t first = p.into == kIntoPool ? s.n_entries : p.into == kIntoRing ? s.n_entries - s.n_rows : 0;
  const uint32_t columns = p.first_head + p.heads;  // of a row of scores
  const auto score = [&](uint32_t row, uint32_t head) {
    const int32_t position = s.position + static_cast<int32_t>(row);
    if (p.kind == kCisPosition) return static_cast<float>(position);
    if (p.kind == kCisHash)
      return hash_score(s.seed, p.layer, p.share_heads ? 0 : head, static_cast<uint32_t>(position));
    const float* scores = data<float>(o.score) + uint64_t(row) * columns;
    return p.share_heads ? *std::max_element(scores, scores + columns) : scores[head];
  };
  for (uint32_t head = p.first_head; head < columns; ++head)
    for (uint32_t row = 0; row < s.n_rows; ++row)
      *at<float>(o.cis, head, p.capacity, first + row) = score(row, head);
}

}  // namespace thimble::cpu
