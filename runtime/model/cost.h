// What a step must move and multiply at least, to measure speed by: every weight and every attended entry is
// read once, every new entry written once; activations are not counted. Two operations to a multiplication
// with addition.
#pragma once

#include "runtime/model/model.h"

namespace thimble {

struct Cost {
  double bytes = 0, flop = 0;
  Cost& operator+=(const Cost& other) {
    bytes += other.bytes;
    flop += other.flop;
    return *this;
  }
  Cost operator*(double factor) const { return {bytes * factor, flop * factor}; }
  bool operator==(const Cost&) const = default;
};
inline Cost operator*(double factor, const Cost& cost) { return cost * factor; }

// Of a matrix: its bytes, and operations for one row.
inline Cost product_cost(const Tensor& t) { return {static_cast<double>(t.bytes()), 2.0 * t.rows * t.cols}; }
// Of one entry's keys in one layer: their bytes, and operations for one row of queries.
Cost key_cost(const ModelShape&);
// Layers that attend to everything, without the first `skipped` of all.
uint32_t full_layers(const Model&, uint32_t skipped = 0);

}  // namespace thimble
