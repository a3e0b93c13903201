// ADORE's controller (methods 5): a small recurrent network that reads the embeddings of the text and scores
// how much each token is worth keeping. The score of a token falls with its age. The controller runs on the
// host, one token after the other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace thimble {

struct Controller {
  static constexpr uint32_t kMostWidth = 512;
  // The number of tokens whose embeddings enter the recurrence at once. Each row of the input weights is then
  // read once for all of them.
  static constexpr uint32_t kBlock = 8;

  uint32_t width = 0;  // channels of the state
  uint32_t cols = 0;   // channels of an embedding
  // f32, in the file. A GRU as in PyTorch, with gates in the order reset, update, new:
  const float *input = nullptr, *input_bias = nullptr;          // [3 width][cols], [3 width]
  const float *recurrent = nullptr, *recurrent_bias = nullptr;  // [3 width][width], [3 width]
  // The layer that encodes a token's age, the layer that mixes it with the state, and the layer that computes
  // the score.
  const float *age = nullptr, *age_bias = nullptr;                  // [width]
  const float *interaction = nullptr, *interaction_bias = nullptr;  // [width][width], [width]
  const float *output = nullptr, *output_bias = nullptr;            // [width], [1]
  std::vector<float> ageing;                                        // [width]: interaction x age

  // Computes `ageing`. All other fields must be set.
  void finish();
  // Computes the state after each of these tokens, at most kBlock of them: [tokens][width]. `before` is the
  // state before the first token, or zeros at the beginning of a text.
  void read(std::span<const float> embeddings, const float* before, float* states) const;
  // The part of a token's score that does not depend on its age, [width], in multiples of 1 / kSettledScale.
  static constexpr float kSettledScale = 2048;
  void settle(const float* state, int16_t* settled) const;
  // The score of a token that `others` tokens follow, between 0 and 1.
  float score(const int16_t* settled, uint32_t others) const;
};

}  // namespace thimble
