// sink_score: the softmax weight of a token's key among sink logits, averaged over the queries of its KV
// head.
#include <cmath>
#include <numeric>

#include "backends/cpu/ops.h"
#include "backends/log_sum.h"

namespace thimble::cpu {
namespace {

// The factor that scales the root mean square of x to 1.
float norm_scale(const float* x, const SinkScoreParams& p) {
  const float squares = std::inner_product(x, x + p.width, x, 0.0f);
  return 1.0f / std::sqrt(squares / static_cast<float>(p.width) + p.eps);
}

// The weight of k among `sinks` for query q.
float weight_of_key(const SinkScore& op, const float* q, const float* k, const float* sinks, float bias) {
  const SinkScoreParams& p = op.p;
  const float *q_norm = data<float>(op.q_norm), *k_norm = data<float>(op.k_norm);
  const float scale = norm_scale(q, p) * p.scale;
  const auto product = [&](const auto& y) {
    float sum = 0;
    for (uint32_t c = 0; c < p.width; ++c) sum += q[c] * q_norm[c] * y(c);
    return sum * scale;
  };
  const float own = product([&](uint32_t c) { return k[c] * k_norm[c]; }) * norm_scale(k, p) + bias;
  LogSum all{own, 1};
  for (uint32_t s = 0; s < p.sinks; ++s) {
    const LogSum sink{product([&](uint32_t c) { return sinks[s * p.width + c]; }), 1};
    all = merged(all, sink, std::exp(gap(all, sink)));
  }
  return std::exp(own - all.peak) / all.sum;
}

}  // namespace

void sink_score(const Context& c, const SinkScore& op) {
  const SinkScoreParams& p = op.p;
  for_rows(c, c.step.n_rows * p.heads, p.group * (p.sinks + 1) * p.width, [&](uint32_t i) {
    const uint32_t head = i % p.heads;
    const float* q = data<float>(op.q) + size_t(i) * p.group * p.width;
    const float* k = data<float>(op.k) + size_t(i) * p.width;
    const float* sinks = data<float>(op.sinks) + size_t(head) * p.sinks * p.width;
    const float* bias = data<float>(op.bias) + head * p.group;
    float sum = 0;
    for (uint32_t g = 0; g < p.group; ++g) sum += weight_of_key(op, q + g * p.width, k, sinks, bias[g]);
    data<float>(op.score)[i] = sum / static_cast<float>(p.group);
  });
}

}  // namespace thimble::cpu
