#include "runtime/plan/cost_model.h"

#include <algorithm>

#include "runtime/policy/kv_types.h"
#include "runtime/policy/policy.h"

namespace thimble {

CostModel::CostModel(const Model& model, const SessionOptions& o, const Policies& policies)
    : full_entry_(full_entry_cost(model, o).both), stored_entry_(stored_entry_cost(model, o)) {
  for (const Layer& layer : model.layers) {
    layers_ += product_cost(layer.token_branch);
    for (const Mixer& mixer : layer.mixers)
      layers_ += std::visit([](const auto& m) { return product_cost(m) + state_cost(m); }, mixer);
    if (layer.has_window())
      windows_.push_back({double(layer.attention()->window), entry_cost(model, *layer.attention(), o).both});
    if (const auto* experts = std::get_if<Experts>(&layer.feed_forward)) {
      layers_ += product_cost(experts->router) + product_cost(experts->latent_down) +
                 product_cost(experts->latent_up) + product_cost(experts->shared) +
                 product_cost(experts->shared_gate);
      experts_ += product_cost(Dense{experts->gate, experts->up, experts->down});
      expert_share_ = double(experts->route.chosen) / experts->route.experts;
    } else {
      layers_ += product_cost(std::get<Dense>(layer.feed_forward));
    }
  }
  layers_ += policies.retention->cost(o);
  output_ = product_cost(model.output);
  most_decode_ = policies.selection->most_attended(o);
  most_chunk_ = policies.selection->selects_chunks(o) ? most_decode_ : UINT32_MAX;
}

Cost CostModel::run(double rows, double entries, bool chunk, bool logits) const {
  Cost cost{layers_.bytes, rows * layers_.flop};
  // Of the experts' weights, only those of chosen experts are read. Each row is multiplied by its own experts
  // only.
  cost += {std::min(1.0, rows * expert_share_) * experts_.bytes, rows * expert_share_ * experts_.flop};
  if (logits) cost += output_;
  // The first row attends to one entry more than the head held, and each further row to one more. Keys and
  // values of these entries are read, and those of the rows are written.
  const auto attend = [&](const Cost& entry, double most) {
    const double first = std::min(entries + 1, most), last = std::min(entries + rows, most);
    cost += {(last + rows) * entry.bytes, rows * (first + last) / 2 * entry.flop};
  };
  attend(full_entry_, chunk ? most_chunk_ : most_decode_);
  for (const Window& window : windows_) attend(window.entry, window.tokens);
  return cost;
}

}  // namespace thimble
