#include "runtime/model/cost.h"

namespace thimble {

Cost product_cost(const AttentionMixer& m) {
  return product_cost(m.q) + product_cost(m.k) + product_cost(m.v) + product_cost(m.output);
}

// The state is read and written once for each step. It is too small to count.
Cost product_cost(const ShortConvMixer& m) {
  return product_cost(m.in) + product_cost(m.conv) + product_cost(m.out);
}

Cost product_cost(const Dense& f) { return product_cost(f.gate) + product_cost(f.up) + product_cost(f.down); }

Cost key_cost(const AttentionMixer& m) {
  return {static_cast<double>(m.kv_heads * kv_bytes(DType::kF16, m.head_dim)), 2.0 * m.heads * m.head_dim};
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
    if (layer.attends_to_all()) heads += layer.attention()->kv_heads;
  return heads;
}

}  // namespace thimble
