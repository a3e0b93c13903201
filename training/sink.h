// The loss of a sink retainer and its gradient: the op `sink_score` with binary cross-entropy.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace thimble {

// The values of the paper (Fast KVzip).
constexpr uint32_t kSinkRank = 16, kSinkCount = 16;

struct SinkShape {
  uint32_t heads, group;  // KV heads; query heads per KV head
  uint32_t tokens;

  uint32_t queries() const { return heads * group; }
  // Channels that a token's state is projected to: first those of the queries, then those of the keys.
  uint32_t channels() const { return (queries() + heads) * kSinkRank; }
};

// The parameters of a layer's retainer in addition to its matrix, or their gradients.
template <typename T>
struct SinkParameters {
  T* q_bias;           // [query][rank]
  T *q_norm, *k_norm;  // [rank]: weights of the norms
  T* sinks;            // [head][sink][rank]
  T* bias;             // [query]
};

// Binary cross-entropy of the scores against `labels` [head][tokens], which are in [0, 1]. It is averaged
// over tokens and summed over heads. `projected` is [channels][tokens], without q_bias. Writes the gradients
// of `projected` and of the parameters. They do not depend on the number of threads.
double loss_of_sinks(const SinkShape&, const SinkParameters<const float>&, const float* projected,
                     const float* labels, float* by_projected, const SinkParameters<float>& by_parameters,
                     ThreadPool&);

}  // namespace thimble
