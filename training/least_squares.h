// Linear retainers by least squares, from sums over the tokens of texts: memory does not grow with their
// number.
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
  // For texts of at most so many tokens. `threads`: of the host, beside the device's; 0: one a core. None
  // changes a bit.
  static Result<std::unique_ptr<LeastSquares>> make(std::shared_ptr<Device>, const SampleShape&,
                                                    uint32_t text_tokens, uint32_t threads);
  // All that it allocates.
  static Result<uint64_t> bytes(const Device&, const SampleShape&, uint32_t text_tokens);

  // What a layer's retainer reads of the text that is being read, f16 [tokens][cols]: to be written.
  uint16_t* states(uint32_t layer) { return &states_[uint64_t(layer) * text_tokens_ * shape_.cols]; }
  // Adds them for the text's tokens, whose labels are [heads][tokens].
  Status add(uint32_t layer, uint32_t tokens, const float* labels);
  // All layers of the text were added.
  void end_text(uint32_t tokens);
  uint64_t texts() const { return count_.texts; }

  // All that a later step depends on, as it lies in memory. clear() begins anew.
  std::vector<std::span<std::byte>> state();
  void clear();

  // Solves one layer; false where all are. Refused where its states or labels are no numbers.
  Result<bool> step();
  uint32_t steps_done() const { return static_cast<uint32_t>(solved_.size()); }
  uint32_t steps() const { return shape_.layers; }
  double loss() const { return loss_; }  // of the last layer: how far a score is off, squared, on average
  const FittedLayer& layer(uint32_t layer) const { return solved_[layer]; }

 private:
  LeastSquares(const SampleShape& shape, uint32_t text_tokens, uint32_t threads);
  // Over tokens, of what a layer's retainer reads, x, and of its labels, y. Of xx the lower triangle, row
  // behind row.
  struct Sums {
    std::vector<double> xx, x, xy, y, yy;  // [cols (cols + 1) / 2], [cols], [heads][cols], [heads], [heads]
  };
  uint32_t block_tokens() const { return block_tokens(text_tokens_); }
  static uint32_t block_tokens(uint32_t text_tokens);
  Status add_block(uint32_t layer, uint32_t first, uint32_t tokens, std::span<const double> labels);
  void transpose_block(const uint16_t* states, uint32_t tokens);
  // A layer's products of x less its mean, times scale, and with the ridge: their factor, [cols][cols].
  struct Factor {
    double scale, ridge;
    std::vector<double> of;
  };
  Result<Factor> factorise_layer(const Sums&);
  // Sets a head's weights and bias; returns how far its scores are off, squared, summed over tokens.
  double solve_head(const Sums&, const Factor&, uint32_t head, double mean, FittedLayer& to) const;

  const SampleShape shape_;
  const uint32_t text_tokens_;
  ThreadPool threads_;
  std::unique_ptr<Product> product_;
  std::vector<uint16_t> states_;  // [layers][text_tokens_][cols]
  std::vector<Sums> sums_;        // of each layer
  struct {
    uint64_t texts, tokens;
  } count_{};
  std::vector<FittedLayer> solved_;
  double loss_ = 0;
};

}  // namespace thimble
