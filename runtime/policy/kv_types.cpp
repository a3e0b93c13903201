#include "runtime/policy/kv_types.h"

#include <algorithm>
#include <cmath>

namespace thimble {

DType dtype_of(KvFormat format) {
#define X(name, in_files) DType::k##name,
  static constexpr DType kTypes[] = {THIMBLE_KV_FORMATS(X)};
#undef X
  return kTypes[static_cast<size_t>(format)];
}

namespace {

constexpr float kMostKeyBias = 10;

// The largest magnitude in a vector; 0 if the model has none.
float largest(const Tensor& vector) {
  const auto* values = reinterpret_cast<const float*>(vector.data);
  float most = 0;
  for (uint32_t i = 0; vector && i < vector.cols; ++i) most = std::max(most, std::fabs(values[i]));
  return most;
}

// Whether few of the model's layers see the whole text.
bool few_see_all(const Model& model) {
  const auto all = std::count_if(model.layers.begin(), model.layers.end(),
                                 [](const Layer& layer) { return layer.attends_to_all(); });
  return 2 * static_cast<size_t>(all) <= model.layers.size();
}

}  // namespace

KvTypes kv_types(const Model& model, const AttentionMixer& m, const SessionOptions& o) {
  const auto type = [&](KvFormat asked, bool is_delicate) {
    if (asked == KvFormat::kQ4_0 && is_delicate) asked = KvFormat::kQ8_0;
    return kv_fits(dtype_of(asked), m.head_dim) ? dtype_of(asked) : DType::kF16;
  };
  const bool few = few_see_all(model), has_large_keys = largest(m.k_bias) > kMostKeyBias;
  return {type(has_large_keys ? KvFormat::kF16 : o.key_format, few || m.k_bias),
          type(o.value_format, few && !m.window)};
}

uint32_t finer_layers(const Model& model, const SessionOptions& o) {
  const KvTypes asked{dtype_of(o.key_format), dtype_of(o.value_format)};
  uint32_t count = 0;
  for (const Layer& layer : model.layers)
    if (const AttentionMixer* m = layer.attention(); m && m->has_keys())
      count += kv_types(model, *m, o) != asked;
  return count;
}

KvTypes recall_types(const Model& model, const AttentionMixer& m, const SessionOptions& o) {
  SessionOptions asked = o;
  asked.key_format = asked.value_format = o.recall_format;
  const KvTypes pool = kv_types(model, m, o), store = kv_types(model, m, asked);
  return {pool.k == DType::kF16 ? store.k : pool.k, pool.v == DType::kF16 ? store.v : pool.v};
}

EntryCost entry_cost(const Model& model, const AttentionMixer& m, const SessionOptions& o) {
  const KvTypes types = kv_types(model, m, o);
  return {key_cost(m, types.k), entry_cost(m, types.k, types.v)};
}

EntryCost full_entry_cost(const Model& model, const SessionOptions& o) {
  EntryCost sum;
  for (const Layer& layer : model.layers) {
    if (!layer.attends_to_all()) continue;
    const EntryCost cost = entry_cost(model, *layer.attention(), o);
    sum.keys += cost.keys;
    sum.both += cost.both;
  }
  return sum;
}

Cost stored_entry_cost(const Model& model, const SessionOptions& o) {
  Cost sum;
  for (const Layer& layer : model.layers) {
    if (!layer.attends_to_all()) continue;
    const KvTypes types = recall_types(model, *layer.attention(), o);
    sum += entry_cost(*layer.attention(), types.k, types.v);
  }
  return sum;
}

}  // namespace thimble
