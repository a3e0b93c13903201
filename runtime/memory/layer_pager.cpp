#include "runtime/memory/layer_pager.h"

#include <algorithm>

namespace thimble {
namespace {

// The layers that are in memory only for their use: the one that runs, and the next one.
constexpr uint32_t kAhead = 2;

// The weights of a layer that every token needs.
std::vector<Tensor> weights_of(const Layer& layer) {
  std::vector<Tensor> all = layer.tensors();
  const auto* experts = std::get_if<Experts>(&layer.feed_forward);
  std::erase_if(all, [&](const Tensor& t) {
    const auto is = [&](const Tensor& other) { return t.data == other.data; };
    return !t || (experts && (is(experts->gate) || is(experts->up) || is(experts->down)));
  });
  return all;
}

uint64_t bytes_of(const std::vector<Tensor>& tensors) {
  uint64_t bytes = 0;
  for (const Tensor& t : tensors) bytes += t.bytes();
  return bytes;
}

}  // namespace

std::vector<uint32_t> paged_layers(const Model& model, uint64_t bytes) {
  const uint64_t layers = model.layers.size();
  std::vector<uint64_t> of_layer;
  uint64_t all = model.output.bytes(), largest = 0;
  for (const Layer& layer : model.layers) {
    of_layer.push_back(bytes_of(weights_of(layer)));
    all += of_layer.back();
    largest = std::max(largest, of_layer.back());
  }
  if (all <= bytes) return {};
  std::vector<uint32_t> paged;
  for (uint64_t count = 1; count <= layers; ++count) {
    paged.clear();
    uint64_t resident = all + std::min<uint64_t>(count, kAhead) * largest;
    for (uint64_t layer = 0; layer < layers; ++layer)
      if ((layer + 1) * count / layers > layer * count / layers) {
        paged.push_back(static_cast<uint32_t>(layer));
        resident -= of_layer[layer];
      }
    if (resident <= bytes) break;
  }
  return paged;
}

uint64_t paged_bytes(const Model& model, std::span<const uint32_t> layers) {
  uint64_t bytes = 0;
  for (const uint32_t layer : layers) bytes += bytes_of(weights_of(model.layers[layer]));
  return bytes;
}

LayerPager::LayerPager(const Model& model, std::span<const uint32_t> layers) {
  for (const uint32_t layer : layers) {
    Paged paged{.layer = layer, .ranges = {}};
    for (const Tensor& t : weights_of(model.layers[layer])) {
      const std::span<const std::byte> bytes(t.data, t.bytes());
      for (const GgufFile& file : model.files()) {
        const std::span<const std::byte> all = file.map.bytes();
        if (!std::less<>()(bytes.data(), all.data()) &&
            bytes.data() + bytes.size() <= all.data() + all.size())
          paged.ranges.push_back({&file.map, bytes});
      }
    }
    layers_.push_back(std::move(paged));
  }
}

void LayerPager::before(uint32_t layer) {
  const auto next =
      std::find_if(layers_.begin(), layers_.end(), [&](const Paged& p) { return p.layer >= layer; });
  const size_t first = static_cast<size_t>(next - layers_.begin());
  for (size_t i = 0; i < std::min<size_t>(layers_.size(), kAhead); ++i) {
    Paged& p = layers_[(first + i) % layers_.size()];  // after the last layer follows the next step's first
    if (p.ahead) continue;
    for (const Range& range : p.ranges) range.file->read_ahead(range.bytes);
    p.ahead = true;
  }
}

void LayerPager::after(uint32_t layer) {
  for (Paged& p : layers_) {
    if (p.layer != layer) continue;
    for (const Range& range : p.ranges) range.file->drop(range.bytes);
    p.ahead = false;
  }
}

}  // namespace thimble
