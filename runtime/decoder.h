// The step, written once: what happens to a token from its embedding to its logits.
#pragma once

#include <memory>
#include <vector>

#include "runtime/memory/planner.h"
#include "runtime/model/model.h"

namespace thimble {

// What a session's steps multiply by.
struct Weights {
  std::shared_ptr<const PlacedTensors> model, heads;  // heads: null without
  Weight of(const Tensor& t) const {
    const Weight w = model->weight(t);
    return w || !heads ? w : heads->weight(t);
  }
};

// A recorded step over chunks: segments are the embedding, the layers, and the tail that gives logits.
struct ChunkProgram {
  uint32_t max_rows = 0;
  std::unique_ptr<Program> program;
};

// All that a session replays.
struct Programs {
  std::vector<ChunkProgram> chunks;  // ascending max_rows; rows go through the chunk buffer, then compaction
  std::unique_ptr<Program> decode;   // one row, appended to the pool, attending by selection; one segment
  std::unique_ptr<Program>
      score_ring;                  // retention scores of the decoded tokens in the ring; one segment a layer
  std::unique_ptr<Program> evict;  // compaction of a full pool; one segment a layer
  std::unique_ptr<Program> log_prob;  // of the targets, after a tail
};

class Decoder {
 public:
  Decoder(const Model& model, const MemoryPlan& plan, const Weights& weights, const Layout& layout);

  Result<Programs> record(Stream&) const;

  // Segments of a step.
  static constexpr uint32_t kHead = 0;
  uint32_t tail() const { return 1 + model_.shape.layers; }

 private:
  enum class Step { kChunk, kDecode };
  void record_step(Recorder&, Step) const;
  void attention_block(Recorder&, uint32_t layer, Step) const;
  void project_qkv(Recorder&, const LayerWeights&) const;
  void retaining_head(Recorder&, uint32_t layer, View qkv, uint32_t into, View cis, uint32_t capacity) const;
  void append(Recorder&, uint32_t layer, Step) const;
  void select(Recorder&, uint32_t layer, Step) const;
  void attend(Recorder&, uint32_t layer, Step) const;
  void retain(Recorder&, uint32_t layer, bool with_chunk) const;
  void feed_forward(Recorder&, uint32_t layer) const;
  void tail_block(Recorder&) const;

  void norm(Recorder&, View x, const Tensor& weight, View y, uint32_t rows) const;
  void head_norm(Recorder&, const Tensor& weight, uint32_t first_column, uint32_t heads) const;
  void linear(Recorder&, View x, uint32_t x_stride, const Tensor& w, const Tensor& bias, View y,
              uint32_t y_stride, bool add, uint32_t rows = kStepRows) const;
  Weight embedding() const;
  View qkv_columns(uint32_t first) const;
  RopeParams rope() const;

  const Model& model_;
  const ModelShape& shape_;
  const SessionOptions& options_;
  const Dimensions& dimensions_;
  const Weights& weights_;
  const Layout& at_;
};

}  // namespace thimble
