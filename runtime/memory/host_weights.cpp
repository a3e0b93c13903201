#include "runtime/memory/host_weights.h"

#include <algorithm>

namespace thimble {
namespace {

template <typename Use>
void each_tensor(const Model& model, uint32_t groups, const Use& use) {
  if (!groups) return;
  const std::vector<std::vector<Tensor>> all = host_groups(model);
  for (size_t i = 0; i < std::min<size_t>(groups, all.size()); ++i)
    for (const Tensor& t : all[i]) use(t);
}

}  // namespace

std::vector<std::vector<Tensor>> host_groups(const Model& model) {
  std::vector<std::vector<Tensor>> groups, layers;
  for (const Layer& layer : model.layers) {
    std::vector<Tensor> chosen;
    if (const auto* experts = std::get_if<Experts>(&layer.feed_forward))
      chosen = {experts->gate, experts->up, experts->down};
    const auto is_chosen = [&](const Tensor& t) {
      return std::any_of(chosen.begin(), chosen.end(),
                         [&](const Tensor& other) { return t.data == other.data; });
    };
    std::vector<Tensor> others = layer.tensors();
    std::erase_if(others, [&](const Tensor& t) { return t.rows <= 1 || is_chosen(t); });  // vectors are small
    std::erase_if(chosen, [](const Tensor& t) { return !t; });
    if (!chosen.empty()) groups.push_back(std::move(chosen));
    layers.push_back(std::move(others));
  }
  groups.insert(groups.end(), layers.begin(), layers.end());
  groups.push_back({model.output});
  return groups;
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
