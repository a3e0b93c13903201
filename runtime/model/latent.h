// Loads latent attention (MLA): sizes, and the tensors of a layer.
#pragma once

#include "runtime/model/families.h"

namespace thimble {

struct LatentSizes {
  uint32_t latent = 0;                    // channels that keys and values are made of
  uint32_t rotated = 0;                   // channels of a key that rotate; all heads share them
  uint32_t query_dim = 0, value_dim = 0;  // channels of a head's query, and of its value
};

Result<LatentSizes> load_latent_sizes(const Gguf& gguf, const std::string& prefix);
// `block`: what the names of the layer's tensors begin with.
Result<AttentionMixer> load_latent(TensorSource& tensors, const std::string& block, const Gguf& gguf,
                                   uint32_t d_model, uint32_t heads, const LatentSizes& sizes);

}  // namespace thimble
