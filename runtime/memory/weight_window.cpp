#include "runtime/memory/weight_window.h"

#include <algorithm>

#include "base/bits.h"
#include "runtime/memory/host_weights.h"

namespace thimble {

// A layer is copied while the layers run that come after the previous one in the window, in equal shares. Its
// slot is free then, because that of the layer before the previous one was read before.
WeightWindow::WeightWindow(const Model& model, const DeviceInfo& device, uint32_t host_groups) {
  constexpr size_t kSlots = 2;
  if (!device.stages_weights) return;
  const std::vector<HostLayer> layers = host_layers(model, host_groups);
  if (layers.size() <= kSlots) return;
  segments_.resize(1 + model.layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    uint64_t bytes = 0, end = 0;
    for (const Tensor& t : layers[i].matrices) bytes += round_up(t.bytes(), device.alignment);
    const uint32_t first = i ? 1 + layers[i - 1].layer : 0, count = layers[i].layer + 1 - first;
    for (const Tensor& t : layers[i].matrices) {
      if (!places_.try_emplace(t.data, Place{static_cast<uint32_t>(i % kSlots), end}).second) continue;
      segments_[first + end * count / bytes].push_back(t);
      end += round_up(t.bytes(), device.alignment);
    }
    slot_bytes_ = std::max(slot_bytes_, end);
  }
}

void WeightWindow::place(Arena& arena) {
  if (empty()) return;
  for (View& slot : slots_) slot = arena.place(slot_bytes_);
}

View WeightWindow::of(const Tensor& t) const {
  const auto found = places_.find(t.data);
  if (found == places_.end()) return {};
  return slots_[found->second.slot].slice(found->second.offset, t.bytes());
}

std::span<const Tensor> WeightWindow::copied_in(uint32_t segment) const {
  return segment < segments_.size() ? segments_[segment] : std::span<const Tensor>();
}

}  // namespace thimble
