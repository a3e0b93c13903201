#include "training/controller_labels.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/bits.h"

namespace thimble {
namespace {

// Rows of the rope table for single positions (backends/backend.h).
constexpr uint32_t kRopeBlock = 64;

// The indices of the `count` largest elements of [0, values.size()). Among equals, the last ones are chosen.
template <typename T>
std::vector<uint32_t> largest(const std::vector<T>& values, size_t count) {
  std::vector<uint32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0u);
  if (count >= order.size()) return order;
  std::nth_element(
      order.begin(), order.begin() + static_cast<ptrdiff_t>(count), order.end(),
      [&](uint32_t a, uint32_t b) { return values[a] != values[b] ? values[a] > values[b] : a > b; });
  order.resize(count);
  return order;
}

}  // namespace

AttentionLabels::AttentionLabels(const Model& model, uint32_t positions, uint32_t best, ThreadPool& threads)
    : model_(model),
      positions_(positions),
      best_(best),
      threads_(threads),
      rope_(uint64_t(rope_table_rows(positions)) * model.rope.n_rot),
      keys_(uint64_t(model.shape.layers) * model.shape.kv_heads * positions * model.shape.head_dim) {
  fill_rope_table(model.rope, positions, UINT32_MAX, rope_.data());
}

uint64_t AttentionLabels::bytes(const Model& model, uint32_t positions, const ThreadPool& threads) {
  const ModelShape& s = model.shape;
  const uint64_t a_head = uint64_t(positions) * s.head_dim;
  // In addition to the keys, each thread stores the keys of one head as floats, and logits with their order.
  const uint64_t workers = std::min(threads.size(), s.kv_heads);
  return uint64_t(s.layers) * s.kv_heads * a_head * sizeof(uint16_t) +
         workers * (a_head + 2 * uint64_t(positions)) * sizeof(float) +
         uint64_t(rope_table_rows(positions)) * model.rope.n_rot * sizeof(float);
}

void AttentionLabels::begin(const std::vector<uint32_t>& queries) {
  queries_ = queries;
  counts_.clear();
  finite_ = true;
  for (const uint32_t query : queries) counts_.emplace_back(query + 1);
}

void AttentionLabels::rotate(float* channels, uint32_t position) const {
  const uint32_t pairs = model_.rope.n_rot / 2;
  const float* far = &rope_[uint64_t(kRopeBlock + position / kRopeBlock) * 2 * pairs];
  const float* near = &rope_[uint64_t(position % kRopeBlock) * 2 * pairs];
  const bool adjacent = model_.rope.pairing == kRopeAdjacent;
  for (uint32_t i = 0; i < pairs; ++i) {
    const float c = far[2 * i] * near[2 * i] - far[2 * i + 1] * near[2 * i + 1];
    const float s = far[2 * i] * near[2 * i + 1] + far[2 * i + 1] * near[2 * i];
    float& a = channels[adjacent ? 2 * i : i];
    float& b = channels[adjacent ? 2 * i + 1 : i + pairs];
    const float turned = a * c - b * s;
    b = a * s + b * c;
    a = turned;
  }
}

void AttentionLabels::keep_keys(uint32_t layer, uint32_t first, uint32_t rows, const float* qkv) {
  const ModelShape& s = model_.shape;
  const uint32_t dh = s.head_dim, stride = model_.layers[layer].attention()->qkv_cols();
  threads_.run(rows, [&](uint32_t row, uint32_t) {
    std::vector<float> key(dh);
    for (uint32_t head = 0; head < s.kv_heads; ++head) {
      std::copy_n(qkv + uint64_t(row) * stride + (s.heads + head) * dh, dh, key.data());
      if (model_.layers[layer].attention()->rotates) rotate(key.data(), first + row);
      std::transform(key.begin(), key.end(), &keys_[keys_at(layer, head) + uint64_t(first + row) * dh],
                     f32_to_f16);
    }
  });
}

// Finds the entries that the queries of a KV head attend to most. Attention increases with the logit, so the
// exponential is not needed.
void AttentionLabels::choose(uint32_t layer, uint32_t kv_head, std::vector<std::vector<uint32_t>>& chosen,
                             const std::vector<std::vector<float>>& asking, size_t first_query) const {
  const ModelShape& s = model_.shape;
  const uint32_t dh = s.head_dim, group = s.heads / s.kv_heads;
  const uint32_t longest = queries_[first_query + asking.size() - 1] + 1;
  std::vector<float> key(uint64_t(longest) * dh), logits;
  const uint16_t* halves = &keys_[keys_at(layer, kv_head)];
  std::transform(halves, halves + key.size(), key.begin(), f16_to_f32);
  for (size_t q = 0; q < asking.size(); ++q)
    for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const float* query = &asking[q][uint64_t(head) * dh];
      logits.resize(queries_[first_query + q] + 1);
      for (size_t t = 0; t < logits.size(); ++t)
        logits[t] = std::inner_product(query, query + dh, &key[t * dh], 0.0f);
      // NaN has no order, so nothing is chosen.
      if (std::none_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); }))
        chosen[q * s.heads + head] = largest(logits, best_ / 2);
    }
}

void AttentionLabels::add(uint32_t layer, uint32_t first, uint32_t rows, const float* qkv) {
  const ModelShape& s = model_.shape;
  const uint32_t dh = s.head_dim, stride = model_.layers[layer].attention()->qkv_cols();
  keep_keys(layer, first, rows, qkv);
  const auto begin = std::lower_bound(queries_.begin(), queries_.end(), first);
  const auto end = std::lower_bound(begin, queries_.end(), first + rows);
  if (begin == end) return;
  std::vector<std::vector<float>> asking;  // rotated queries of all heads
  for (auto query = begin; query != end; ++query) {
    const float* row = qkv + uint64_t(*query - first) * stride;
    std::vector<float>& all = asking.emplace_back(row, row + uint64_t(s.heads) * dh);
    if (model_.layers[layer].attention()->rotates)
      for (uint32_t head = 0; head < s.heads; ++head) rotate(&all[uint64_t(head) * dh], *query);
  }
  const auto first_query = static_cast<size_t>(begin - queries_.begin());
  std::vector<std::vector<uint32_t>> chosen(asking.size() * s.heads);
  threads_.run(s.kv_heads,
               [&](uint32_t head, uint32_t) { choose(layer, head, chosen, asking, first_query); });
  finite_ &= std::none_of(chosen.begin(), chosen.end(), [](const auto& of) { return of.empty(); });
  for (size_t i = 0; i < chosen.size(); ++i)
    for (const uint32_t position : chosen[i]) ++counts_[first_query + i / s.heads][position];
}

std::vector<LabelledQuery> AttentionLabels::labels() const {
  std::vector<LabelledQuery> labels;
  for (size_t q = 0; q < queries_.size(); ++q) {
    std::vector<uint32_t> best = largest(counts_[q], best_);
    std::sort(best.begin(), best.end());
    labels.push_back({queries_[q], std::move(best)});
  }
  return labels;
}

}  // namespace thimble
