// The least that a step must move and multiply, as a reference for speed. Every weight and every attended
// entry is read once, and every new entry is written once. Activations are not counted. A multiplication with
// an addition counts as two operations.
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
  Cost operator+(const Cost& other) const { return Cost(*this) += other; }
  Cost operator*(double factor) const { return {bytes * factor, flop * factor}; }
  bool operator==(const Cost&) const = default;
};
inline Cost operator*(double factor, const Cost& cost) { return cost * factor; }

// The cost of a matrix: its bytes, and the operations for one row.
inline Cost product_cost(const Tensor& t) { return {static_cast<double>(t.bytes()), 2.0 * t.rows * t.cols}; }
// The same for all matrices of a mixer or of a feed-forward. Its vectors are too small to count.
template <typename Part>
Cost product_cost(const Part& part) {
  Cost sum;
  for (const Tensor& t : part.tensors())
    if (t.rows > 1) sum += product_cost(t);
  return sum;
}
// The cost of a mixer's state, which a step reads and writes once, and the operations for one row.
template <typename Mixer>
Cost state_cost(const Mixer& m) {
  return {2.0 * static_cast<double>(m.state_bytes()), m.state_flop()};
}
// The cost of one entry's keys in one layer: their bytes, and the operations for one row of queries.
Cost key_cost(const AttentionMixer&, DType = DType::kF16);
// The same for its keys and values.
Cost entry_cost(const AttentionMixer&, DType k = DType::kF16, DType v = DType::kF16);
// The cost of its keys in f16 in all layers that attend to every entry, without the first `skipped` layers of
// the model.
Cost full_key_cost(const Model&, uint32_t skipped = 0);
// The number of KV heads whose entries these layers attend to.
uint32_t full_heads(const Model&);

}  // namespace thimble
