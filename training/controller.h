// The controller of ADORE: a GRU over token embeddings, followed by a small network. For each token it
// predicts whether later queries will attend to it. The forward and backward passes run on the host.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"

namespace thimble {

struct ControllerShape {
  uint32_t inputs = 0, width = 0;  // channels of an embedding, and of the state
};

// One tensor in the parameter array: [rows][cols], starting at element `first`. A vector has one row.
struct ControllerTensor {
  const char* name;  // in the sidecar, after the prefix "adore."
  uint64_t first;
  uint32_t rows, cols;
  uint32_t fan_in;  // bounds the initial values: 1 / sqrt(fan_in)
  uint64_t size() const { return uint64_t(rows) * cols; }
};
enum ControllerPart : uint32_t {
  kWeightIh,  // [3 width][inputs], gates in the order r, z, n
  kBiasIh,
  kWeightHh,  // [3 width][width]
  kBiasHh,
  kPositionWeight,
  kPositionBias,
  kInteractionWeight,
  kInteractionBias,
  kOutputWeight,
  kOutputBias,
  kControllerParts
};
using ControllerTensors = std::array<ControllerTensor, kControllerParts>;
ControllerTensors tensors_of(ControllerShape);
uint64_t parameters_of(ControllerShape);

// The labels that full attention gives to one query.
struct LabelledQuery {
  uint32_t position = 0;
  std::vector<uint32_t> best;  // positions with label 1, ascending; all others up to `position` have 0
};

// A part of a text, used as a training sample. The first `warm` tokens only bring the GRU state up to date:
// the state before them is zero, and neither they nor the tokens before them get gradients. Each token is
// scored for every later query.
struct Excerpt {
  std::span<const uint32_t> rows;  // for each token, its row in the embeddings
  uint32_t first = 0;              // position of the first token
  uint32_t warm = 0;
  std::span<const LabelledQuery> queries;  // ascending
};

// Results do not depend on the number of threads. T is float, or double in tests.
template <typename T>
class ControllerNetwork {
 public:
  // `embeddings` [rows][inputs] is not owned and must stay valid.
  ControllerNetwork(ControllerShape, std::span<const T> embeddings, ThreadPool&);

  std::span<T> parameters() { return parameters_; }
  std::span<const T> parameters() const { return parameters_; }

  // Returns the mean cross-entropy of all scores in the excerpts, and overwrites `gradient` with its
  // gradient.
  double loss(std::span<const Excerpt>, std::span<T> gradient);

  // Returns logits [query][position]: the score of each token before a query, computed from the state after
  // that token. `rows` is a whole text.
  std::vector<std::vector<T>> score(std::span<const uint32_t> rows, std::span<const LabelledQuery>);

  // Bytes that loss() needs for so many tokens.
  static uint64_t bytes(ControllerShape, uint32_t tokens);

 private:
  struct Tape;  // what the backward pass needs of an excerpt
  struct Sums;  // what the scores of an excerpt add to the gradient

  const T* part(ControllerPart p) const { return parameters_.data() + tensors_[p].first; }
  void prepare(std::span<const std::span<const uint32_t>> texts);
  void run(std::span<const uint32_t> rows, uint32_t keep_from, Tape&) const;
  void interact(const T* state, T* to) const;
  void score_and_differentiate(const Excerpt&, double pairs, Tape&, Sums&) const;
  void back_propagate(const Excerpt&, Tape&) const;
  void add_inner_gradients(std::span<const Excerpt>, const std::vector<Tape>&, const std::vector<Sums>&,
                           T* gradient) const;
  void add_recurrent_gradients(const std::vector<Tape>&, T* gradient) const;
  void add_input_gradients(std::span<const Excerpt>, const std::vector<Tape>&, T* gradient) const;

  const ControllerShape shape_;
  const ControllerTensors tensors_;
  const std::span<const T> embeddings_;
  ThreadPool& threads_;
  std::vector<T> parameters_;

  // For the texts in use: the distinct rows, W_ih x + b_ih of each, and the other matrices transposed.
  std::vector<uint32_t> distinct_, place_of_row_;
  std::vector<T> projected_;  // [distinct][3 width]
  std::vector<T> recurrent_, interaction_;
  std::vector<T> slope_;  // W w_p of the interaction: what one unit of age adds before the tanh
};

// The age of a token for a query `distance` positions after it.
double controller_age(uint32_t distance);

}  // namespace thimble
