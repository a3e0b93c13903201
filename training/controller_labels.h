// The labels of a controller: the earlier tokens that the model attends to most, over all its layers and
// heads.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "runtime/model/model.h"
#include "training/controller.h"

namespace thimble {

// Counts the labels of one text's queries during a dense reading. For each query, layer and query head, it
// counts the best / 2 entries with the most attention, which may include the query's own entry. The `best`
// tokens with the highest counts get label 1. Among equal counts, the larger position comes first.
class AttentionLabels {
 public:
  // `positions` is the largest number of tokens per text. The model must not have layers with a window.
  AttentionLabels(const Model&, uint32_t positions, uint32_t best, ThreadPool&);
  // Bytes that this class allocates: the keys of a text in all layers, as f16 like in the pool, and scratch
  // memory for scoring.
  static uint64_t bytes(const Model&, uint32_t positions, const ThreadPool&);

  void begin(const std::vector<uint32_t>& queries);  // positions, ascending
  // Adds the next rows of a layer: [rows][H dh queries, Hkv dh keys, values] before RoPE, as a Reader passes
  // them on (Retainer::Input::kQkv).
  void add(uint32_t layer, uint32_t first, uint32_t rows, const float* qkv);
  // Call it after the whole text was read.
  std::vector<LabelledQuery> labels() const;
  // False if the model produced queries or keys that are not finite. The labels are meaningless then.
  bool finite() const { return finite_; }

 private:
  void rotate(float* channels, uint32_t position) const;
  // The index of the first key of a head.
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
  std::vector<std::vector<uint32_t>> counts_;  // for each query: [position]
};

}  // namespace thimble
