#include "runtime/memory/host_weights.h"

#include <algorithm>
#include <bit>

namespace thimble {
namespace {

// The matrices of a layer's experts.
std::vector<Tensor> experts_of(const Layer& layer) {
  const auto* experts = std::get_if<Experts>(&layer.feed_forward);
  if (!experts) return {};
  std::vector<Tensor> all{experts->gate, experts->up, experts->down};
  std::erase_if(all, [](const Tensor& t) { return !t; });
  return all;
}

// All others. Vectors are small, and stay on the card.
std::vector<Tensor> matrices_of(const Layer& layer) {
  const std::vector<Tensor> experts = experts_of(layer);
  std::vector<Tensor> all = layer.tensors();
  std::erase_if(all, [&](const Tensor& t) {
    return t.rows <= 1 || std::any_of(experts.begin(), experts.end(),
                                      [&](const Tensor& other) { return t.data == other.data; });
  });
  return all;
}

std::vector<std::vector<Tensor>> expert_groups(const Model& model) {
  std::vector<std::vector<Tensor>> groups;
  for (const Layer& layer : model.layers)
    if (std::vector<Tensor> experts = experts_of(layer); !experts.empty())
      groups.push_back(std::move(experts));
  return groups;
}

// All layers in an order of which every beginning is spread evenly: by the reversed bits of their number,
// from the last one. The first layer comes last, because nothing runs before it.
std::vector<uint32_t> spread(uint32_t layers) {
  const int bits = std::bit_width(layers);
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < 1u << bits; ++i) {
    uint32_t reversed = 0;
    for (int bit = 0; bit < bits; ++bit) reversed |= (i >> bit & 1) << (bits - 1 - bit);
    if (reversed < layers) order.push_back(layers - 1 - reversed);
  }
  return order;
}

template <typename Use>
void each_tensor(const Model& model, uint32_t groups, const Use& use) {
  if (!groups) return;
  const std::vector<std::vector<Tensor>> all = host_groups(model);
  for (size_t i = 0; i < std::min<size_t>(groups, all.size()); ++i)
    for (const Tensor& t : all[i]) use(t);
}

}  // namespace

std::vector<std::vector<Tensor>> host_groups(const Model& model) {
  std::vector<std::vector<Tensor>> groups = expert_groups(model);
  for (const uint32_t layer : spread(static_cast<uint32_t>(model.layers.size())))
    groups.push_back(matrices_of(model.layers[layer]));
  groups.push_back({model.output});
  return groups;
}

std::vector<HostLayer> host_layers(const Model& model, uint32_t groups) {
  const size_t experts = expert_groups(model).size();
  std::vector<uint32_t> layers = spread(static_cast<uint32_t>(model.layers.size()));
  layers.resize(std::min(layers.size(), groups - std::min<size_t>(groups, experts)));
  std::sort(layers.begin(), layers.end());
  std::vector<HostLayer> all;
  for (const uint32_t layer : layers) all.push_back({layer, matrices_of(model.layers[layer])});
  return all;
}

std::unordered_set<const std::byte*> host_weights(const Model& model, uint32_t groups) {
  std::unordered_set<const std::byte*> tensors;
  each_tensor(model, groups, [&](const Tensor& t) { tensors.insert(t.data); });
  return tensors;
}

uint64_t host_weight_bytes(const Model& model, uint32_t groups) {
  uint64_t bytes = 0;
  each_tensor(model, groups, [&](const Tensor& t) { bytes += t.bytes(); });
  return bytes;
}

}  // namespace thimble
