// The cost of whole steps (runtime/model/cost.h), from a model and the resolved options.
#pragma once

#include "runtime/model/cost.h"

namespace thimble {

struct SessionOptions;
struct Policies;

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
