// A window in a card's memory through which layers pass whose weights stay in the host's memory. A copy reads
// the bus at twice the speed of a kernel. While layers are computed, the next one of these is copied.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "runtime/memory/arena.h"
#include "runtime/model/model.h"

namespace thimble {

class WeightWindow {
 public:
  WeightWindow() = default;
  // `host_groups`: how many groups of weights are in the host's memory. Only matrices that every token needs
  // pass through the window. Empty if the device reads all weights over the bus, or if the window would take
  // as much memory as these layers.
  WeightWindow(const Model&, const DeviceInfo&, uint32_t host_groups);
  bool empty() const { return segments_.empty(); }
  // The number of tensors that pass through the window in a step.
  uint32_t copies() const { return static_cast<uint32_t>(places_.size()); }

  // Takes two slots, each as large as the largest of the layers. The layers use them in turn.
  void place(Arena&);
  // Where a step reads a tensor of these layers. Empty: it is another tensor.
  View of(const Tensor&) const;
  // The tensors that are copied while a segment of a step runs: 0 is the head, and 1 + i is layer i.
  std::span<const Tensor> copied_in(uint32_t segment) const;

 private:
  struct Place {
    uint32_t slot;
    uint64_t offset;
  };
  uint64_t slot_bytes_ = 0;
  View slots_[2];
  std::unordered_map<const std::byte*, Place> places_;  // by a tensor's first byte
  std::vector<std::vector<Tensor>> segments_;
};

}  // namespace thimble
