// What a step must move and multiply at least, to measure speed by: every weight and every attended entry is
// read once, every new entry written once; activations are not counted. Two operations to a multiplication
// with addition.
#pragma once

#include "runtime/session_options.h"

namespace thimble {

struct Cost {
  double bytes = 0, flop = 0;
  Cost& operator+=(const Cost& other) {
    bytes += other.bytes;
    flop += other.flop;
    return *this;
  }
  Cost operator*(double factor) const { return {bytes * factor, flop * factor}; }
};

class CostModel {
 public:
  CostModel() = default;
  CostModel(const Model&, const SessionOptions& resolved);

  // A step of `step.n_rows` rows behind `step.n_entries` entries, without the choice of what they attend to;
  // with the logits of one row or without.
  Cost run(const StepParams& step, bool logits) const;
  // That choice, in all layers.
  Cost select(const StepParams& step) const;

 private:
  // Entries that one row attends to when it can see `entries`.
  double attended(double entries) const;

  Cost layers_;          // the weights of all layers: their bytes, and operations for one row
  Cost output_;          // the same of the output matrix
  double selected_ = 0;  // longest list of a selection; 0: none
  double key_bytes_ = 0,
         key_flop_ = 0;  // one entry's keys in all layers: their bytes, and operations for one row
};

}  // namespace thimble
