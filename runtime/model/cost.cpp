#include "runtime/model/cost.h"

namespace thimble {

Cost key_cost(const AttentionMixer& m, DType type) {
  return {static_cast<double>(m.kv_heads * kv_bytes(type, m.head_dim)), 2.0 * m.heads * m.head_dim};
}

Cost entry_cost(const AttentionMixer& m, DType k, DType v) {
  const Cost keys = key_cost(m, k);
  return m.is_latent() ? Cost{keys.bytes, keys.flop + 2.0 * m.attended_cols()} : keys + key_cost(m, v);
}

Cost full_key_cost(const Model& model, uint32_t skipped) {
  Cost sum;
  for (size_t i = skipped; i < model.layers.size(); ++i)
    if (model.layers[i].attends_to_all()) sum += key_cost(*model.layers[i].attention());
  return sum;
}

uint32_t full_heads(const Model& model) {
  uint32_t heads = 0;
  for (const Layer& layer : model.layers)
    if (layer.retains()) heads += layer.attention()->kv_heads;
  return heads;
}

}  // namespace thimble
