// The controller of ADORE: a GRU over token embeddings and a small network behind it, which says of each
// token whether the queries to come will attend to it. Forward and backward, on the host.
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

// A parameter tensor among the others: [rows][cols] from `first` on, a vector where it has one row.
struct ControllerTensor {
  const char* name;  // in the sidecar, behind "adore."
  uint64_t first;
  uint32_t rows, cols;
  uint32_t fan_in;  // what the channels that it makes are sums of
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

// What the full attention of a query makes of the text before it.
struct LabelledQuery {
  uint32_t position = 0;
  std::vector<uint32_t> best;  // positions with label 1, ascending; all others up to `position` have 0
};

// A part of a text that is learnt from. Its first `warm` tokens only bring the state up: the state before
// them is zero, and neither they nor what is before them get gradients. A token is scored for each later
// query.
struct Excerpt {
  std::span<const uint32_t> rows;  // of each token, its row of the embeddings
  uint32_t first = 0;              // position of the first token
  uint32_t warm = 0;
  std::span<const LabelledQuery> queries;  // ascending
};

// Results do not depend on the number of threads. T: float, and double for tests.
template <typename T>
class ControllerNetwork {
 public:
  // `embeddings`: [rows][inputs], lent.
  ControllerNetwork(ControllerShape, std::span<const T> embeddings, ThreadPool&);

  std::span<T> parameters() { return parameters_; }
  std::span<const T> parameters() const { return parameters_; }

  // The mean cross-entropy of all scores in some excerpts, and its gradient, which is overwritten.
  double loss(std::span<const Excerpt>, std::span<T> gradient);

  // The logits that queries give to the tokens before them, [query][position], from the state after each
  // token of whole texts.
  std::vector<std::vector<T>> score(std::span<const uint32_t> rows, std::span<const LabelledQuery>);

  static uint64_t bytes(ControllerShape, uint32_t tokens);  // that loss() takes, for so many tokens

 private:
  struct Tape;  // what the backward pass needs of an excerpt
  struct Sums;  // what its scores add to the gradient

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

  // For the texts at hand: their distinct rows and W_ih x + b_ih of each; the other matrices transposed.
  std::vector<uint32_t> distinct_, place_of_row_;
  std::vector<T> projected_;  // [distinct][3 width]
  std::vector<T> recurrent_, interaction_;
  std::vector<T> slope_;  // W w_p of the interaction: what a unit of age adds before the tanh
};

// Age of a token to a query that stands `distance` behind it.
double controller_age(uint32_t distance);

}  // namespace thimble
