// What a controller learns: which earlier tokens the model itself attends to most, over all its layers and
// heads.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "runtime/model/model.h"
#include "training/controller.h"

namespace thimble {

// Gathers the labels of one text's queries while the text is read densely. Of each query, layer and query
// head the best / 2 entries with most attention are counted, the query's own among them; the `best` tokens
// that are counted most often have label 1. Of equals the larger position comes first.
class AttentionLabels {
 public:
  // For a model without windows, and texts of at most so many tokens.
  AttentionLabels(const Model&, uint32_t positions, uint32_t best, ThreadPool&);
  // What it allocates: the keys of a text in all layers as halves, as the pool holds them, and room to score.
  static uint64_t bytes(const Model&, uint32_t positions, const ThreadPool&);

  void begin(const std::vector<uint32_t>& queries);  // positions, ascending
  // A layer's next rows: [rows][H dh queries, Hkv dh keys, values] before RoPE, as a Reader hands them out
  // (Retainer::Input::kQkv).
  void add(uint32_t layer, uint32_t first, uint32_t rows, const float* qkv);
  // When all was read.
  std::vector<LabelledQuery> labels() const;
  // False where the model gave queries or keys that are no numbers; labels then mean nothing.
  bool finite() const { return finite_; }

 private:
  void rotate(float* channels, uint32_t position) const;
  // Of a head's keys the first.
  uint64_t keys_at(uint32_t layer, uint32_t head) const {
    return (uint64_t(layer) * model_.shape.kv_heads + head) * positions_ * model_.shape.head_dim;
  }
  void keep_keys(uint32_t layer, uint32_t first, uint32_t rows, const float* qkv);
  void choose(uint32_t layer, uint32_t kv_head, std::vector<std::vector<uint32_t>>& chosen,
              const std::vector<std::vector<float>>& asking, size_t first_query) const;

  const Model& model_;
  const uint32_t positions_, best_;
  ThreadPool& threads_;
  std::vector<float> rope_;
  std::vector<uint16_t> keys_;  // f16 [layer][kv head][position][dh], rotated
  bool finite_ = true;
  std::vector<uint32_t> queries_;
  std::vector<std::vector<uint32_t>> counts_;  // of each query: [position]
};

}  // namespace thimble
