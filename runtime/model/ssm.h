// Loads Mamba-2 layers, of the families granitehybrid, nemotron_h, nemotron_h_moe and falcon-h1.
#pragma once

#include "runtime/model/families.h"

namespace thimble {

struct SsmSizes {
  uint32_t heads = 0, groups = 0, width = 0, state = 0, taps = 0;
};

Result<SsmSizes> load_ssm_sizes(const Gguf& gguf, const std::string& prefix);
// `block`: what the names of the layer's tensors begin with.
Result<SsmMixer> load_ssm(TensorSource& tensors, const std::string& block, const Family& family,
                          uint32_t d_model, const SsmSizes& sizes);

}  // namespace thimble
