// Rotary positions with the two-level table of backends/backend.h. Device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// Made from an op's `rope` operand and parameters.
struct Rope {
  const float2* table;  // [64 + blocks][pairs]{cos, sin}; null if nothing rotates
  uint32_t pairs;

  // cos and sin of pair p at a position, times the model's attention factor.
  __device__ float2 angle(uint32_t position, uint32_t p) const {
    const float2 high = table[uint64_t(64 + position / 64) * pairs + p],
                 low = table[(position % 64) * pairs + p];
    return {high.x * low.x - high.y * low.y, high.x * low.y + high.y * low.x};
  }
  // The model's attention factor, which is cos at position 0 of the upper half.
  __device__ float factor() const { return table[64 * pairs].x; }
};

// Pair p consists of channels first(p) and second(p) of a head.
__device__ inline uint32_t first_of_pair(uint32_t p, uint32_t pairing) {
  return pairing == kRopeAdjacent ? 2 * p : p;
}
__device__ inline uint32_t second_of_pair(uint32_t p, uint32_t pairing, uint32_t pairs) {
  return pairing == kRopeAdjacent ? 2 * p + 1 : p + pairs;
}

// Channel c of a head's query after rotation to a position.
__device__ inline float rotated_channel(const float* q, uint32_t c, uint32_t position, const Rope& rope,
                                        uint32_t pairing) {
  if (c >= 2 * rope.pairs) return q[c];
  const uint32_t pair = pairing == kRopeAdjacent ? c / 2 : c % rope.pairs;
  const uint32_t first = first_of_pair(pair, pairing);
  const float x = q[first], y = q[second_of_pair(pair, pairing, rope.pairs)];
  const float2 angle = rope.angle(position, pair);
  return c == first ? x * angle.x - y * angle.y : x * angle.y + y * angle.x;
}

}  // namespace thimble::cuda
