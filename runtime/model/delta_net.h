// Loads layers with linear attention by the gated delta rule, of the families qwen35, qwen35moe and
// qwen3next.
#pragma once

#include "runtime/model/families.h"

namespace thimble {

struct DeltaNetSizes {
  uint32_t key_heads = 0, value_heads = 0, width = 0, taps = 0;
};

Result<DeltaNetSizes> load_delta_net_sizes(const Gguf& gguf, const std::string& prefix);
// Which of the file's layers have linear attention; the others attend.
Result<std::vector<bool>> load_recurrent_layers(const Gguf& gguf, const std::string& prefix, uint32_t layers);
// `block`: what the names of the layer's tensors begin with.
Result<DeltaNetMixer> load_delta_net(TensorSource& tensors, const std::string& block, const Family& family,
                                     const DeltaNetSizes& sizes, Model& model);

}  // namespace thimble
