// A session: which positions of its text it still holds, and which of them the last token attended to.
#include <algorithm>
#include <numeric>

#include "runtime/session.h"

namespace thimble {
namespace {

// A view of which the host reads the first bytes: where it lies, or a copy of them in `host` where it cannot.
Result<const std::byte*> readable(Device& device, const View& view, uint64_t bytes, const View& host) {
  if (!host) return on_host<const std::byte>(view);
  std::byte* copy = on_host<std::byte>(host);
  if (bytes) THIMBLE_TRY(device.read(copy, view.slice(0, bytes)));
  return copy;
}

}  // namespace

Result<uint64_t> Session::positions_read() {
  THIMBLE_TRY(go_on());
  return read_;
}

Status Session::kept_by_position(float* kept, float* attended) {
  if (attended && !plan_.options.watch)
    return error(Code::kInvalidArgument,
                 "this session does not keep what attention is told by; make it with options.watch = 1");
  if (attended && attended_ == Attended::kUnknown)
    return error(
        Code::kInvalidArgument,
        "what the last token attended to is not known: none was read, or entries were evicted or the "
        "text was rewound after it; read or generate a token first");
  if (kept) THIMBLE_TRY(count_kept(kept));
  return attended ? add_attention(attended) : Status();
}

// A layer's array of 4 bytes an entry, [run], as far as its heads hold entries.
template <typename T>
Result<const T*> Session::layer_values(uint32_t layer, const View& values, const View& host) const {
  const size_t last = size_t{layer + 1} * model_->shape.kv_heads - 1;
  const uint64_t entries = uint64_t(plan_.dimensions.runs[last].first) + entries_[last];
  THIMBLE_LET(bytes, readable(*device_, values, entries * sizeof(T), host));
  return reinterpret_cast<const T*>(bytes);
}

Status Session::count_kept(float* kept) const {
  const ModelShape& s = model_->shape;
  std::fill_n(kept, read_, 0.0f);
  uint32_t heads = 0;
  for (uint32_t layer = 0; layer < s.layers; ++layer) {
    if (model_->layers[layer].window) continue;
    THIMBLE_LET(positions, layer_values<int32_t>(layer, layout_.layers[layer].pos, layout_.host_pos));
    for (uint32_t head = 0; head < s.kv_heads; ++head, ++heads) {
      const size_t i = size_t{layer} * s.kv_heads + head;
      const int32_t* held = positions + plan_.dimensions.runs[i].first;
      for (uint32_t entry = 0; entry < entries_[i]; ++entry) ++kept[held[entry]];
    }
  }
  for (uint64_t i = 0; i < read_ && heads; ++i) kept[i] /= static_cast<float>(heads);
  return {};
}

// By the queries of the last token, anew. A sink takes its share, and sums are rounded: what is left is made
// to sum to 1.
Status Session::add_attention(float* attended) {
  const uint32_t layers = model_->shape.layers;
  const uint32_t first = attended_ == Attended::kList ? layers : 0;
  std::fill_n(attended, read_, 0.0f);
  fill_heads(0, false, false);
  const StepParams step = step_params(0);
  for (uint32_t layer = 0; layer < layers; ++layer) {
    THIMBLE_TRY(stream_->submit(*programs_.watch, first + layer, first + layer + 1, step, heads_));
    THIMBLE_TRY(stream_->wait());
    THIMBLE_TRY(add_layer_attention(layer, attended));
  }
  const double sum = std::accumulate(attended, attended + read_, 0.0);
  if (!(sum > 0))
    return error(Code::kNotFinite, "the last token's attention is NaN, infinite or paid to nothing it read");
  for (uint64_t i = 0; i < read_; ++i) attended[i] = static_cast<float>(attended[i] / sum);
  return {};
}

// Adds the weights that the layer's heads gave.
Status Session::add_layer_attention(uint32_t layer, float* attended) const {
  const uint32_t kv_heads = model_->shape.kv_heads, window = model_->layers[layer].window;
  THIMBLE_LET(positions, layer_values<int32_t>(layer, layout_.layers[layer].pos, layout_.host_pos));
  THIMBLE_LET(weights, layer_values<float>(layer, layout_.watch_weights, layout_.host_weights));
  const std::byte* lists = nullptr;
  const SelectionPolicy::List list =
      attended_ == Attended::kList ? policies_.selection->last_list(layer) : SelectionPolicy::List{};
  if (list.entries) {
    THIMBLE_LET(read, readable(*device_, list.entries, list.entries.bytes, layout_.host_lists));
    lists = read;
  }
  for (uint32_t head = 0; head < kv_heads; ++head) {
    const size_t i = size_t{layer} * kv_heads + head;
    const uint32_t run = plan_.dimensions.runs[i].first;
    const int32_t* held = positions + run;
    const float* weight = weights + run;
    if (lists) {
      const uint32_t* entries = reinterpret_cast<const uint32_t*>(lists) + uint64_t(head) * list.capacity;
      for (uint32_t n = 0; n < entries[0]; ++n) attended[held[entries[1 + n]]] += weight[n];
    } else {
      for (uint32_t n = window && entries_[i] > window ? entries_[i] - window : 0; n < entries_[i]; ++n)
        attended[held[n]] += weight[n];
    }
  }
  return {};
}

}  // namespace thimble
