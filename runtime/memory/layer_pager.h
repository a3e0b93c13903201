// Layers that do not stay in memory. Where a device reads the mapped files, the system would otherwise drop
// the pages that are needed next: a step reads all layers in order, and the oldest pages go first.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/model/model.h"

namespace thimble {

// As few layers as possible that are read from the file in every step, so that all others stay within `bytes`
// of memory together with the two that are read ahead. They are spread evenly, because the file is read while
// the layers in between are computed. Empty: all weights fit. Experts are not counted, since a token needs
// few of them; the system keeps those that are used most.
std::vector<uint32_t> paged_layers(const Model&, uint64_t bytes);
// The bytes of these layers that are read again.
uint64_t paged_bytes(const Model&, std::span<const uint32_t> layers);

// Reads these layers ahead of their use, and drops them afterwards.
class LayerPager {
 public:
  LayerPager() = default;
  LayerPager(const Model&, std::span<const uint32_t> layers);
  bool empty() const { return layers_.empty(); }
  void before(uint32_t layer);
  void after(uint32_t layer);

 private:
  struct Range {
    const MappedFile* file;
    std::span<const std::byte> bytes;
  };
  struct Paged {
    uint32_t layer;
    std::vector<Range> ranges;
    bool ahead = false;  // it was read ahead and not dropped since
  };
  std::vector<Paged> layers_;  // in order
};

}  // namespace thimble
