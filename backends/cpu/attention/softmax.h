// What the two ops of attention share: queries of a tile of keys, sinks, caps, and parts of a softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/kernels.h"
#include "backends/cpu/kv_scratch.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/rope.h"
#include "backends/log_sum.h"

namespace thimble::cpu {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLog2E = 1.44269504f;  // queries are scaled by it, so that the softmax works in base 2

// Soft-caps logits that are scaled for a softmax in base 2.
inline void cap_scores(const TileScratch& t, uint32_t vectors, float cap) {
  if (cap != 0) kernels().soft_cap(t.scores, vectors * kTileKeys, cap * kLog2E);
}

// The initial state of a query's softmax: empty, or the sink's logit, which has no value vector.
inline LogSum sink_of(const In& sinks, uint32_t query) {
  return sinks ? LogSum{data<float>(sinks)[query] * kLog2E, 1} : LogSum{-kInfinity, 0};
}

// y = x * factor for the channels of one head.
inline void write_scaled(const float* x, float factor, uint32_t channels, float* y) {
  for (uint32_t c = 0; c < channels; ++c) y[c] = x[c] * factor;
}

// Rotates a row's queries for a tile whose keys rotate by their index in the tile: by the remaining
// difference of their position to that of the tile. The model's attention factor applies to both sides, but
// the low half of the table does not contain it. Queries with weights were rotated to their position first,
// and rotate back by that of the tile.
inline void rotate_for_tile(const Rope& rope, uint32_t position, uint32_t first_key, uint32_t group,
                            uint32_t width, const float* q, float* angles, float* rotated) {
  const bool weighted = rope.query_weight;
  const float factor = rope.factor();
  rope.angles(weighted ? first_key : position - first_key, angles);
  if (weighted)
    rope.invert(angles);
  else
    for (uint32_t i = 0; i < 2 * rope.pairs; ++i) angles[i] *= factor;
  std::memcpy(rotated, q, group * width * sizeof(float));
  for (uint32_t h = 0; h < group; ++h) rope.rotate(rotated + h * width, angles);
}

// Keeps a part's softmax of one KV head: the results in t.
inline void keep_part(const PartScratch& parts, uint32_t head, uint32_t number, uint32_t group,
                      uint32_t width, const TileScratch& t) {
  const uint64_t at_part = uint64_t(head * kMaxParts + number) * group;
  std::memcpy(parts.peak + at_part, t.peak, group * sizeof(float));
  std::memcpy(parts.sum + at_part, t.sum, group * sizeof(float));
  std::memcpy(parts.out + at_part * width, t.out, group * width * sizeof(float));
}

// Combines the first n parts of query h of a KV head's group, in order, and writes its result.
inline void combine_parts(const PartScratch& parts, uint32_t head, uint32_t n, uint32_t group, uint32_t h,
                          uint32_t width, const In& sinks, uint32_t query, uint32_t cols, float* y) {
  const uint64_t first = uint64_t(head) * kMaxParts * group + h;
  const auto part_of = [&](uint32_t i) {
    return LogSum{parts.peak[first + i * group], parts.sum[first + i * group]};
  };
  const LogSum sink = sink_of(sinks, query);
  LogSum all{sink.peak, 0};
  for (uint32_t i = 0; i < n; ++i) all.peak = std::max(all.peak, part_of(i).peak);
  if (sinks) all = merged(all, sink, std::exp2(gap(all, sink)));
  for (uint32_t i = 0; i < n; ++i) all = merged(all, part_of(i), std::exp2(gap(all, part_of(i))));
  std::fill_n(y, cols, 0.0f);
  for (uint32_t i = 0; i < n; ++i) {
    const float weight = std::exp2(gap(all, part_of(i))) / all.sum;
    const float* out = parts.out + (first + i * group) * width;
    for (uint32_t c = 0; c < cols; ++c) y[c] += weight * out[c];
  }
}

}  // namespace thimble::cpu
