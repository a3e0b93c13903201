#include "runtime/cost.h"

#include <algorithm>

namespace thimble {

static Cost weigh(const Tensor& t) { return {static_cast<double>(t.bytes()), 2.0 * t.rows * t.cols}; }

CostModel::CostModel(const Model& model, const SessionOptions& o) {
  const ModelShape& s = model.shape;
  for (const LayerWeights& l : model.layers)
    for (const Tensor& t : {l.q, l.k, l.v, l.attn_output, l.gate, l.up, l.down}) layers_ += weigh(t);
  if (o.heads)
    for (const Tensor& t : o.heads->tensors()) layers_ += weigh(t);
  output_ = weigh(model.output);
  if (o.selection != Selection::kDense) selected_ = double(o.select_init) + o.select_k + o.select_local;
  const double layers = s.layers, f16 = 2;
  key_bytes_ = layers * s.kv_heads * s.head_dim * f16;
  key_flop_ = layers * s.heads * s.head_dim * 2;
}

double CostModel::attended(double entries) const {
  return selected_ > 0 ? std::min(entries, selected_) : entries;
}

Cost CostModel::run(const StepParams& step, bool logits) const {
  const double rows = step.n_rows, entries = step.n_entries;
  Cost cost{layers_.bytes, rows * layers_.flop};
  if (logits) cost += output_;
  // The first row sees one entry more than there were, each further row one more.
  const double first = attended(entries + 1), last = attended(entries + rows);
  cost += {(last + rows) * 2 * key_bytes_, rows * (first + last) / 2 * 2 * key_flop_};
  return cost;
}

Cost CostModel::select(const StepParams& step) const {
  const double entries = double(step.n_entries) + step.n_rows;
  if (selected_ == 0 || entries <= selected_) return {};
  const double middle = entries - step.n_init - step.n_local;
  return {middle * key_bytes_, middle * key_flop_};
}

}  // namespace thimble
