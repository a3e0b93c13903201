// route: chooses the experts of each token and groups the tokens by expert.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cpu/ops.h"

namespace thimble::cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// An expert's weight before normalization over the chosen ones.
static float share_of(uint32_t kind, float logit, float peak, float sum) {
  if (kind == kRouteSoftmax) return std::exp(logit - peak) / sum;
  return kind == kRouteSigmoid ? 1 / (1 + std::exp(-logit)) : logit;
}

// The value that a row chooses experts by, larger first: the logit, or with a bias, the weight plus the bias.
static float preference(const Route& op, const float* logits, uint32_t expert, float peak, float sum) {
  const float logit = logits[expert];
  const float value = op.bias ? share_of(op.p.kind, logit, peak, sum) + data<float>(op.bias)[expert] : logit;
  return std::isnan(value) ? -kInfinity : value;
}

// The chosen experts of one row in ascending order, and their weights.
static void choose(const Route& op, const float* logits, uint32_t* experts, float* weights) {
  const RouteParams& p = op.p;
  const float peak = *std::max_element(logits, logits + p.experts);
  float sum = 0;
  if (p.kind == kRouteSoftmax)
    for (uint32_t e = 0; e < p.experts; ++e) sum += std::exp(logits[e] - peak);

  for (uint32_t i = 0; i < p.chosen; ++i) {
    uint32_t best = p.experts;
    float highest = 0;
    for (uint32_t e = 0; e < p.experts; ++e) {
      if (std::find(experts, experts + i, e) != experts + i) continue;
      const float value = preference(op, logits, e, peak, sum);
      if (best == p.experts || value > highest) best = e, highest = value;
    }
    experts[i] = best;
  }
  std::sort(experts, experts + p.chosen);

  for (uint32_t i = 0; i < p.chosen; ++i) weights[i] = share_of(p.kind, logits[experts[i]], peak, sum);
  float total = 0;
  if (p.kind == kRouteSoftmaxOfChosen) {
    const float highest = *std::max_element(weights, weights + p.chosen);
    for (uint32_t i = 0; i < p.chosen; ++i) weights[i] = std::exp(weights[i] - highest);
  }
  for (uint32_t i = 0; i < p.chosen; ++i) total += weights[i];
  const bool divides = p.share || p.kind == kRouteSoftmaxOfChosen;
  // As in the models' own code, the divisor is at least f16's smallest normal number.
  const float by = divides ? std::max(total, 6.103515625e-5f) : 1;
  for (uint32_t i = 0; i < p.chosen; ++i) weights[i] = weights[i] / by * p.scale;
}

void route(const Context& c, const Route& op) {
  const RouteParams& p = op.p;
  const uint32_t rows = c.step.n_rows, slots = rows * p.chosen;
  uint32_t* experts = reinterpret_cast<uint32_t*>(c.scratch.data());  // [rows][chosen]
  float* weights = reinterpret_cast<float*>(experts + slots);
  for_rows(c, rows, p.experts * p.chosen, [&](uint32_t r) {
    choose(op, data<float>(op.logits) + size_t(r) * p.experts, experts + r * p.chosen,
           weights + r * p.chosen);
  });

  uint32_t* first = data<uint32_t>(op.first);
  std::fill_n(first, p.experts + 1, 0u);
  for (uint32_t i = 0; i < slots; ++i) ++first[experts[i] + 1];
  for (uint32_t e = 0; e < p.experts; ++e) first[e + 1] += first[e];
  // Until all rows are placed, first[e] is the next free slot of expert e. Afterwards the array moves back by
  // one.
  for (uint32_t i = 0; i < slots; ++i) {
    const uint32_t slot = first[experts[i]]++;
    data<uint32_t>(op.row)[slot] = i / p.chosen;
    data<float>(op.weight)[slot] = weights[i];
  }
  std::copy_backward(first, first + p.experts, first + p.experts + 1);
  first[0] = 0;
}

}  // namespace thimble::cpu
