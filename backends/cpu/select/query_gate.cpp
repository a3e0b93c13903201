// query_gate: whether this step's query is close enough to the query that made the cached selection.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu/entries.h"

namespace thimble::cpu {

// Sums in 16 interleaved parts, which are then added in order.
static float dot(const float* x, const float* y, uint32_t n) {
  float parts[16] = {};
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (uint32_t j = 0; j < 16; ++j) parts[j] += x[i + j] * y[i + j];
  for (; i < n; ++i) parts[i % 16] += x[i] * y[i];
  float sum = 0;
  for (float part : parts) sum += part;
  return sum;
}

void query_gate(const Context& ctx, const QueryGate& o) {
  const StepParams& s = ctx.step;
  const uint32_t n = o.p.cols;
  GateState& gate = *data<GateState>(o.gate);
  gate.hit = 0;
  // Within a generation a head only gains entries, so equal counts mean an unchanged set of heads to select
  // from.
  const auto layer = ctx.heads.subspan(o.p.head_state, o.p.heads);
  const auto selecting = static_cast<uint32_t>(std::count_if(
      layer.begin(), layer.end(), [&](const HeadState& head) { return selects(s, step_entries(s, head)); }));
  if (selecting == 0) {
    gate.valid = 0;
    return;
  }
  const float* q = data<float>(o.q);
  float* cached = data<float>(o.cached);
  // Miss if more than half of the local window passed since the last miss: too many tokens left the window
  // without having been candidates.
  if (gate.valid && gate.generation == s.generation && gate.selecting == selecting &&
      s.position - gate.position <= static_cast<int32_t>(s.n_local / 2) && s.theta < 1) {
    // We avoid a division: equal queries then give sqrt(x * x) = x and hit for every theta below 1, including
    // all-zero queries.
    const bool close = dot(q, cached, n) >= s.theta * std::sqrt(dot(q, q, n) * dot(cached, cached, n));
    gate.hit = close || s.theta <= -1;
  }
  if (gate.hit) {
    ++gate.hits;
    return;
  }
  ++gate.misses;
  gate.valid = 1;
  gate.generation = s.generation;
  gate.position = s.position;
  gate.selecting = selecting;
  std::memcpy(cached, q, n * sizeof(float));
}

}  // namespace thimble::cpu
