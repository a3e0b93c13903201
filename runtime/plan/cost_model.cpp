#include "runtime/plan/cost_model.h"

#include <algorithm>

#include "runtime/policy/policy.h"

namespace thimble {

CostModel::CostModel(const Model& model, const SessionOptions& o, const Policies& policies)
    : key_(key_cost(model.shape)), full_(full_layers(model)) {
  for (const LayerWeights& l : model.layers) {
    for (const Tensor& t :
         {l.q, l.k, l.v, l.attn_output, l.router, l.shared_gate, l.shared_up, l.shared_down})
      layers_ += product_cost(t);
    for (const Tensor& t : {l.gate, l.up, l.down}) feed_forward_ += product_cost(t);
    if (l.window) windows_.push_back(l.window);
  }
  if (model.shape.experts) expert_share_ = double(model.shape.chosen_experts) / model.shape.experts;
  layers_ += policies.retention->cost(o);
  output_ = product_cost(model.output);
  most_decode_ = policies.selection->most_attended(o);
  most_chunk_ = policies.selection->selects_chunks(o) ? most_decode_ : UINT32_MAX;
}

Cost CostModel::run(double rows, double entries, bool chunk, bool logits) const {
  Cost cost{layers_.bytes, rows * layers_.flop};
  // Of the experts' weights, only those of chosen experts are read. Each row is multiplied by its own experts
  // only.
  cost +=
      {std::min(1.0, rows * expert_share_) * feed_forward_.bytes, rows * expert_share_ * feed_forward_.flop};
  if (logits) cost += output_;
  // The first row attends to one entry more than the head held, and each further row to one more. Keys and
  // values of these entries are read, and those of the rows are written.
  const auto attend = [&](double layers, double most) {
    const double first = std::min(entries + 1, most), last = std::min(entries + rows, most);
    cost += {layers * (last + rows) * 2 * key_.bytes, layers * rows * (first + last) / 2 * 2 * key_.flop};
  };
  attend(full_, chunk ? most_chunk_ : most_decode_);
  for (const double window : windows_) attend(1, window);
  return cost;
}

}  // namespace thimble
