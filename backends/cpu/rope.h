// Rotary positions with the two-level table of backends/backend.h.
#pragma once

#include <cstdint>

#include "backends/cpu/kv_kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

struct Rope {
  const float* table;  // [64 + blocks][pairs]{cos, sin}; null if the op rotates nothing
  uint32_t pairs;
  // Pair p consists of channels p * step and p * step + second.
  uint32_t step, second;
  const float* query_weight;  // of the channels of a rotated query; null: 1

  Rope(const In& rows, const RopeParams& p)
      : table(rows ? data<float>(rows) : nullptr),
        pairs(p.n_rot / 2),
        step(p.pairing == kRopeAdjacent ? 2 : 1),
        second(p.pairing == kRopeAdjacent ? 1 : pairs),
        query_weight(p.query_weight ? table + p.query_weight : nullptr) {}

  // The model's attention factor, which is cos at position 0.
  float factor() const { return pairs ? table[64 * 2 * pairs] : 1; }

  // Writes cos and sin of every pair at a position: [pairs]{cos, sin}.
  void angles(uint32_t position, float* out) const {
    const float* high = table + (64 + position / 64) * 2 * pairs;
    const float* low = table + position % 64 * 2 * pairs;
    for (uint32_t p = 0; p < pairs; ++p) {
      out[2 * p] = high[2 * p] * low[2 * p] - high[2 * p + 1] * low[2 * p + 1];
      out[2 * p + 1] = high[2 * p] * low[2 * p + 1] + high[2 * p + 1] * low[2 * p];
    }
  }

  // Rotates the vector of one head by angles(); channels from n_rot on are unchanged.
  void rotate(float* x, const float* angle) const {
    if (step == 2)  // with constants for step and second the compiler can vectorize
      rotate_pairs(x, x + 1, 2, angle);
    else
      rotate_pairs(x, x + pairs, 1, angle);
  }
  // The same for a query, which is then multiplied by its weights.
  void rotate_query(float* q, const float* angle, uint32_t head_dim) const {
    rotate(q, angle);
    weigh(q, head_dim);
  }
  void weigh(float* q, uint32_t head_dim) const {
    for (uint32_t c = 0; query_weight && c < head_dim; ++c) q[c] *= query_weight[c];
  }
  // Inverts the angles of a rotation.
  void invert(float* angle) const {
    for (uint32_t p = 0; p < pairs; ++p) angle[2 * p + 1] = -angle[2 * p + 1];
  }

 private:
  void rotate_pairs(float* a, float* b, uint32_t stride, const float* angle) const {
    for (uint32_t p = 0; p < pairs; ++p) {
      const float cos = angle[2 * p], sin = angle[2 * p + 1], x = a[p * stride], y = b[p * stride];
      a[p * stride] = x * cos - y * sin;
      b[p * stride] = x * sin + y * cos;
    }
  }
};

// The low half of the table in the layout of rotate_tile(): cos and sin of each pair for positions 0 to 63,
// [n_rot][kTileKeys].
inline void transpose_low_half(const In& rope, const RopeParams& p, float* low) {
  const std::byte* rows[kTileKeys];
  for (uint32_t i = 0; i < kTileKeys; ++i) rows[i] = data<std::byte>(rope) + i * p.n_rot * sizeof(float);
  kv_format(DType::kF32)->load_tile(rows, kTileKeys, p.n_rot, low);
}

}  // namespace thimble::cpu
