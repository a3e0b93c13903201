// ADORE's controller (methods 5): a small recurrent network that reads the text's embeddings and says how
// much each token is worth keeping, the less it is worth the older it grows. It works on the host, one token
// after the other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace thimble {

struct Controller {
  static constexpr uint32_t kMostWidth = 512;
  // Tokens whose embeddings the recurrence is fed with at once: a row of its weights is then read once for
  // all.
  static constexpr uint32_t kBlock = 8;

  uint32_t width = 0;  // of the state
  uint32_t cols = 0;   // of an embedding
  // f32, in the file. A GRU as PyTorch has it, its gates in the order reset, update, new:
  const float *input = nullptr, *input_bias = nullptr;          // [3 width][cols], [3 width]
  const float *recurrent = nullptr, *recurrent_bias = nullptr;  // [3 width][width], [3 width]
  // What a token's age becomes, the layer that mixes it with the state, and the score of that.
  const float *age = nullptr, *age_bias = nullptr;                  // [width]
  const float *interaction = nullptr, *interaction_bias = nullptr;  // [width][width], [width]
  const float *output = nullptr, *output_bias = nullptr;            // [width], [1]
  std::vector<float> ageing;                                        // [width]: interaction x age

  // Fills in `ageing`, when all else is there.
  void finish();
  // The states behind each of these tokens, at most kBlock: [tokens][width]. `before` is the state before the
  // first, and zeros where a text begins.
  void read(std::span<const float> embeddings, const float* before, float* states) const;
  // What of a token's score does not depend on its age, [width], as multiples of 1 / kSettledScale.
  static constexpr float kSettledScale = 2048;
  void settle(const float* state, int16_t* settled) const;
  // The token's score when so many others follow it, between 0 and 1.
  float score(const int16_t* settled, uint32_t others) const;
};

}  // namespace thimble
