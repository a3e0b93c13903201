// route: chooses the experts of each token and groups the tokens by expert.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cpu/ops.h"

namespace thimble::cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// An expert's weight before normalization over the chosen ones.
static float share_of(uint32_t kind, float logit, float peak, float sum) {
  switch (kind) {
    case kRouteSoftmax:
      return std::exp(logit - peak) / sum;
    case kRouteSigmoid:
      return 1 / (1 + std::exp(-logit));
    case kRouteSqrtSoftplus:
      return std::sqrt(std::max(logit, 0.0f) + std::log1p(std::exp(-std::fabs(logit))));
    default:
      return logit;
  }
}

// The value that a row chooses experts by, larger first: the logit, or with a bias or groups, the weight plus
// the bias.
static float preference(const Route& op, const float* logits, uint32_t expert, float peak, float sum) {
  float value = logits[expert];
  if (op.bias || op.p.groups) value = share_of(op.p.kind, value, peak, sum);
  if (op.bias) value += data<float>(op.bias)[expert];
  return std::isnan(value) ? -kInfinity : value;
}

// The groups that a row uses, one bit each. `value` is the preference of an expert.
template <typename Value>
static uint32_t best_groups(const RouteParams& p, const Value& value) {
  const uint32_t size = p.experts / p.groups;
  float values[kMostGroups];
  for (uint32_t g = 0; g < p.groups; ++g) {
    float first = -kInfinity, second = size > 1 ? -kInfinity : 0;
    for (uint32_t e = g * size; e < (g + 1) * size; ++e) {
      const float v = value(e);
      if (size > 1) second = std::max(second, std::min(first, v));
      first = std::max(first, v);
    }
    values[g] = std::isnan(first + second) ? -kInfinity : first + second;
  }
  uint32_t groups = 0;
  for (uint32_t i = 0; i < p.groups_used; ++i) {
    uint32_t best = p.groups;
    for (uint32_t g = 0; g < p.groups; ++g)
      if (!(groups >> g & 1) && (best == p.groups || values[g] > values[best])) best = g;
    groups |= 1u << best;
  }
  return groups;
}

// The chosen experts of one row in ascending order, and their weights.
static void choose(const Route& op, const float* logits, uint32_t* experts, float* weights) {
  const RouteParams& p = op.p;
  const float peak = *std::max_element(logits, logits + p.experts);
  float sum = 0;
  if (p.kind == kRouteSoftmax)
    for (uint32_t e = 0; e < p.experts; ++e) sum += std::exp(logits[e] - peak);
  const auto value_of = [&](uint32_t expert) { return preference(op, logits, expert, peak, sum); };
  const uint32_t groups = p.groups ? best_groups(p, value_of) : 0;

  for (uint32_t i = 0; i < p.chosen; ++i) {
    uint32_t best = p.experts;
    float highest = 0;
    for (uint32_t e = 0; e < p.experts; ++e) {
      if (std::find(experts, experts + i, e) != experts + i) continue;
      if (p.groups && !(groups >> e / (p.experts / p.groups) & 1)) continue;
      const float value = value_of(e);
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
  for (uint32_t i = 0; i < p.chosen; ++i)
    weights[i] = weights[i] / by * p.scale * (op.each ? data<float>(op.each)[experts[i]] : 1);
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
