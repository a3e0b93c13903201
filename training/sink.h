// The loss of a retainer of the kind "sink", and its gradient: the op `sink_score` and binary cross-entropy.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace thimble {

// As published (Fast KVzip).
constexpr uint32_t kSinkRank = 16, kSinkCount = 16;

struct SinkShape {
  uint32_t heads, group;  // KV heads; queries of each
  uint32_t tokens;

  uint32_t queries() const { return heads * group; }
  // Channels that a token's state is projected to: those of the queries, then those of the keys.
  uint32_t channels() const { return (queries() + heads) * kSinkRank; }
};

// What a layer's retainer has beside its matrices, or the gradients by it.
template <typename T>
struct SinkParameters {
  T* q_bias;           // [query][rank]
  T *q_norm, *k_norm;  // [rank]: weights of the norms
  T* sinks;            // [head][sink][rank]
  T* bias;             // [query]
};

// Binary cross-entropy of the scores of tokens against `labels`, [head][tokens], shares of 1: a mean over
// tokens, summed over heads. `projected`: [channels][tokens], without q_bias. Writes the gradients by
// `projected` and by the parameters, the same ones whatever the number of threads.
double loss_of_sinks(const SinkShape&, const SinkParameters<const float>&, const float* projected,
                     const float* labels, float* by_projected, const SinkParameters<float>& by_parameters,
                     ThreadPool&);

}  // namespace thimble
