#include "runtime/model/placed_weights.h"

namespace thimble {

Result<PlacedWeights> PlacedWeights::place(const Model& model, const RetainingHeads* heads, Device& device) {
  PlacedWeights placed;
  THIMBLE_LET(model_buffer, device.import_host(model.file().data(), model.file().size()));
  placed.model_ = {model.file().data(), std::move(model_buffer)};
  if (heads) {
    THIMBLE_LET(heads_buffer, device.import_host(heads->file.data(), heads->file.size()));
    placed.heads_ = {heads->file.data(), std::move(heads_buffer)};
  }
  return placed;
}

Weight PlacedWeights::weight(const Tensor& t) const {
  Weight w;
  if (!t) return w;
  // A wrapped-around distance is larger than any file.
  const uint64_t in_model = reinterpret_cast<uintptr_t>(t.data) - reinterpret_cast<uintptr_t>(model_.first);
  const Placed& file = in_model < model_.buffer->size ? model_ : heads_;
  w.buffer = file.buffer.get();
  w.offset = static_cast<uint64_t>(t.data - file.first);
  w.bytes = t.bytes();
  w.type = t.type;
  w.rows = t.rows;
  w.cols = t.cols;
  return w;
}

}  // namespace thimble
