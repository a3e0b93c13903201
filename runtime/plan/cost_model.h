// The cost of whole steps (runtime/model/cost.h), computed from a model and the resolved options.
#pragma once

#include "runtime/model/cost.h"

namespace thimble {

struct SessionOptions;
struct Policies;

class CostModel {
 public:
  CostModel() = default;
  CostModel(const Model&, const SessionOptions& resolved, const Policies&);

  // The cost of a step of `rows` rows, after `entries` entries in a head that attends to every entry. It does
  // not include the selection. `chunk`: the rows are not a generated token. `logits`: one row gets logits.
  Cost run(double rows, double entries, bool chunk, bool logits) const;
  // The additional cost of such a step if its rows attend to `entries` entries of each head's store.
  Cost stored(double rows, double entries) const {
    return {entries * stored_entry_.bytes, rows * entries * stored_entry_.flop};
  }

 private:
  Cost layers_;              // the weights and states of all layers, without the experts that are chosen
  Cost experts_;             // the weights of all experts of all layers
  double expert_share_ = 1;  // the fraction of the experts that a row uses
  Cost output_;              // the output matrix
  Cost full_entry_;          // one entry in all layers that attend to every entry
  Cost stored_entry_;        // the same in a store
  // The layers with a window: its length, and the cost of one entry.
  struct Window {
    double tokens;
    Cost entry;
  };
  std::vector<Window> windows_;
  double most_decode_ = 0, most_chunk_ = 0;  // most entries that a row attends to in full layers
};

}  // namespace thimble
