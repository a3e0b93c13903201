#include "runtime/model/cost.h"

#include <algorithm>

namespace thimble {

Cost key_cost(const ModelShape& s) {
  return {static_cast<double>(s.kv_heads * kv_bytes(DType::kF16, s.head_dim)), 2.0 * s.heads * s.head_dim};
}

uint32_t full_layers(const Model& model, uint32_t skipped) {
  const auto first = model.layers.begin() + std::min<size_t>(skipped, model.layers.size());
  return static_cast<uint32_t>(
      std::count_if(first, model.layers.end(), [](const LayerWeights& layer) { return !layer.window; }));
}

}  // namespace thimble
