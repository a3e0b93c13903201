#include "runtime/model/cost.h"

namespace thimble {

Cost key_cost(const AttentionMixer& m) {
  return {static_cast<double>(m.kv_heads * kv_bytes(DType::kF16, m.head_dim)), 2.0 * m.heads * m.head_dim};
}

Cost entry_cost(const AttentionMixer& m) {
  const Cost keys = key_cost(m);
  return m.is_latent() ? Cost{keys.bytes, keys.flop + 2.0 * m.attended_cols()} : 2 * keys;
}

static Cost full_sum(const Model& model, uint32_t skipped, Cost (*cost)(const AttentionMixer&)) {
  Cost sum;
  for (size_t i = skipped; i < model.layers.size(); ++i)
    if (model.layers[i].attends_to_all()) sum += cost(*model.layers[i].attention());
  return sum;
}

Cost full_key_cost(const Model& model, uint32_t skipped) { return full_sum(model, skipped, key_cost); }

Cost full_entry_cost(const Model& model) { return full_sum(model, 0, entry_cost); }

uint32_t full_heads(const Model& model) {
  uint32_t heads = 0;
  for (const Layer& layer : model.layers)
    if (layer.retains()) heads += layer.attention()->kv_heads;
  return heads;
}

}  // namespace thimble
