#include "runtime/model/controller.h"

#include <algorithm>
#include <cmath>

namespace thimble {
namespace {

// Adds the products in sixteen partial sums, which compilers keep in registers. The order of the additions is
// always the same.
float dot(const float* a, const float* b, size_t n) {
  constexpr size_t kSums = 16;
  float sums[kSums] = {};
  for (; n >= kSums; n -= kSums, a += kSums, b += kSums)
    for (size_t j = 0; j < kSums; ++j) sums[j] += a[j] * b[j];
  float sum = 0;
  for (size_t j = 0; j < n; ++j) sum += a[j] * b[j];  // the remaining products
  for (const float s : sums) sum += s;
  return sum;
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// tanh by its continued fraction, with an error below 1e-4 and without a branch. A step may compute it a
// hundred times for each token.
float quick_tanh(float x) {
  constexpr float kOne = 4.97f;  // the fraction reaches 1 here
  x = std::min(std::max(x, -kOne), kOne);
  const float s = x * x;
  return x * (135135 + s * (17325 + s * (378 + s))) / (135135 + s * (62370 + s * (3150 + s * 28)));
}

}  // namespace

void Controller::finish() {
  ageing.resize(width);
  for (uint32_t i = 0; i < width; ++i) ageing[i] = dot(interaction + uint64_t(i) * width, age, width);
}

void Controller::read(std::span<const float> embeddings, const float* before, float* states) const {
  const uint32_t tokens = static_cast<uint32_t>(embeddings.size() / cols), gates = 3 * width;
  float from_input[kBlock][3 * kMostWidth], from_state[3 * kMostWidth];
  for (uint32_t gate = 0; gate < gates; ++gate)
    for (uint32_t t = 0; t < tokens; ++t)
      from_input[t][gate] =
          input_bias[gate] + dot(input + uint64_t(gate) * cols, &embeddings[uint64_t(t) * cols], cols);
  for (uint32_t t = 0; t < tokens; ++t, before = states, states += width) {
    for (uint32_t gate = 0; gate < gates; ++gate)
      from_state[gate] = recurrent_bias[gate] + dot(recurrent + uint64_t(gate) * width, before, width);
    for (uint32_t i = 0; i < width; ++i) {
      const float *x = &from_input[t][i], *h = &from_state[i];
      const float reset = sigmoid(x[0] + h[0]), update = sigmoid(x[width] + h[width]);
      const float fresh = std::tanh(x[2 * width] + reset * h[2 * width]);
      states[i] = (1 - update) * fresh + update * before[i];
    }
  }
}

void Controller::settle(const float* state, int16_t* settled) const {
  float mixed[kMostWidth];
  for (uint32_t i = 0; i < width; ++i) mixed[i] = age_bias[i] + state[i];
  for (uint32_t i = 0; i < width; ++i) {
    const float x = interaction_bias[i] + dot(interaction + uint64_t(i) * width, mixed, width);
    const float scaled = std::clamp(x * kSettledScale, float(INT16_MIN), float(INT16_MAX));
    settled[i] = std::isnan(scaled) ? int16_t{0} : static_cast<int16_t>(std::lrint(scaled));
  }
}

float Controller::score(const int16_t* settled, uint32_t others) const {
  const float p = std::log2(1 + static_cast<float>(others)) / 12;  // methods 5.3
  float mixed[kMostWidth];
  for (size_t i = 0; i < width; ++i)
    mixed[i] = quick_tanh(static_cast<float>(settled[i]) / kSettledScale + p * ageing[i]);
  return sigmoid(*output_bias + dot(output, mixed, width));
}

}  // namespace thimble
