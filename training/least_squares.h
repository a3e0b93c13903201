// Fits linear retainers by least squares from sums over tokens. Memory use does not grow with the number of
// texts.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "training/fit.h"
#include "training/product.h"
#include "training/samples.h"

namespace thimble {

class LeastSquares {
 public:
  // `text_tokens` is the largest number of tokens per text. `threads` are host threads, in addition to the
  // device's; 0 means one per core. The result does not depend on it.
  static Result<std::unique_ptr<LeastSquares>> make(std::shared_ptr<Device>, const SampleShape&,
                                                    uint32_t text_tokens, uint32_t threads);
  // Bytes that this class allocates.
  static Result<uint64_t> bytes(const Device&, const SampleShape&, uint32_t text_tokens);

  // The caller writes the retainer inputs of a layer for the current text here: f16 [tokens][cols].
  uint16_t* states(uint32_t layer) { return &states_[uint64_t(layer) * text_tokens_ * shape_.cols]; }
  // Adds the current text's tokens to the sums of a layer. `labels` is [heads][tokens].
  Status add(uint32_t layer, uint32_t tokens, const float* labels);
  // Call it after all layers of the text were added.
  void end_text(uint32_t tokens);
  uint64_t texts() const { return count_.texts; }

  // All that a later step depends on. clear() resets it.
  std::vector<std::span<std::byte>> state();
  void clear();

  // Solves one layer. Returns false if all layers are solved. Returns an error if states or labels are not
  // finite.
  Result<bool> step();
  uint32_t steps_done() const { return static_cast<uint32_t>(solved_.size()); }
  uint32_t steps() const { return shape_.layers; }
  // Mean squared error of the last solved layer's scores.
  double loss() const { return loss_; }
  const FittedLayer& layer(uint32_t layer) const { return solved_[layer]; }

 private:
  LeastSquares(const SampleShape& shape, uint32_t text_tokens, uint32_t threads);
  // Sums over tokens of the retainer's inputs x and labels y. xx contains the lower triangle, row by row.
  struct Sums {
    std::vector<double> xx, x, xy, y, yy;  // [cols (cols + 1) / 2], [cols], [heads][cols], [heads], [heads]
  };
  uint32_t block_tokens() const { return block_tokens(text_tokens_); }
  static uint32_t block_tokens(uint32_t text_tokens);
  Status add_block(uint32_t layer, uint32_t first, uint32_t tokens, std::span<const double> labels);
  void transpose_block(const uint16_t* states, uint32_t tokens);
  // The Cholesky factor [cols][cols] of a layer's centred, scaled products of x, with the ridge added.
  struct Factor {
    double scale, ridge;
    std::vector<double> of;
  };
  Result<Factor> factorise_layer(const Sums&);
  // Sets the weights and bias of a head. Returns the squared error of its scores, summed over tokens.
  double solve_head(const Sums&, const Factor&, uint32_t head, double mean, FittedLayer& to) const;

  const SampleShape shape_;
  const uint32_t text_tokens_;
  ThreadPool threads_;
  std::unique_ptr<Product> product_;
  std::vector<uint16_t> states_;  // [layers][text_tokens_][cols]
  std::vector<Sums> sums_;        // for each layer
  struct {
    uint64_t texts, tokens;
  } count_{};
  std::vector<FittedLayer> solved_;
  double loss_ = 0;
};

}  // namespace thimble
