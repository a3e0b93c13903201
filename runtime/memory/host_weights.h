// Weights that stay in the host's memory because a card's budget has no room for them. The card reads them
// over the bus in each step that needs them.
#pragma once

#include <unordered_set>
#include <vector>

#include "runtime/model/model.h"

namespace thimble {

// The tensors that may stay in the host's memory, in groups. The first groups cost the least time for each
// byte that they leave on the card: the experts of each layer, of which a token needs few, then the other
// matrices of each layer, then the output matrix. Any number of the layers is spread evenly, because some are
// copied while others are computed (weight_window.h).
std::vector<std::vector<Tensor>> host_groups(const Model&);

// A layer's matrices that every token needs.
struct HostLayer {
  uint32_t layer;
  std::vector<Tensor> matrices;
};
// The layers, in order, of which so many of these groups contain these matrices.
std::vector<HostLayer> host_layers(const Model&, uint32_t groups);

// The first bytes of the tensors of so many of these groups.
std::unordered_set<const std::byte*> host_weights(const Model&, uint32_t groups);
// The bytes of these tensors.
uint64_t host_weight_bytes(const Model&, uint32_t groups);

}  // namespace thimble
