// What a step must move and multiply at least, to measure speed by: every weight and every attended entry is
// read once, every new entry written once; activations are not counted. Two operations to a multiplication
// with addition.
#pragma once

#include "runtime/model/model.h"

namespace thimble {

struct SessionOptions;
struct Policies;

struct Cost {
  double bytes = 0, flop = 0;
  Cost& operator+=(const Cost& other) {
    bytes += other.bytes;
    flop += other.flop;
    return *this;
  }
  Cost operator*(double factor) const { return {bytes * factor, flop * factor}; }
};
inline Cost operator*(double factor, const Cost& cost) { return cost * factor; }

// Of a matrix: its bytes, and operations for one row.
inline Cost product_cost(const Tensor& t) { return {static_cast<double>(t.bytes()), 2.0 * t.rows * t.cols}; }
// Of one entry's keys in one layer: their bytes, and operations for one row of queries.
Cost key_cost(const ModelShape&);
// Layers that attend to everything, without the first `skipped` of all.
uint32_t full_layers(const Model&, uint32_t skipped = 0);

class CostModel {
 public:
  CostModel() = default;
  CostModel(const Model&, const SessionOptions& resolved, const Policies&);

  // A step of `rows` rows behind `entries` entries of a head that attends to everything, without the choice
  // of what they attend to; `chunk`: not a generated token; with the logits of one row or without.
  Cost run(double rows, double entries, bool chunk, bool logits) const;

 private:
  Cost layers_;                              // the weights of all layers but those of the feed-forwards
  Cost feed_forward_;                        // these, of all experts where there are experts
  double expert_share_ = 1;                  // of the experts that a row passes through
  Cost output_;                              // the output matrix
  Cost key_;                                 // key_cost()
  double full_ = 0;                          // layers that attend to everything
  std::vector<double> windows_;              // of the others
  double most_decode_ = 0, most_chunk_ = 0;  // entries that a row attends to at most, in full layers
};

}  // namespace thimble
