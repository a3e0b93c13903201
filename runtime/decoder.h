// The decoder records the ops of a step, from a token's embedding to its logits.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "runtime/model/model.h"
#include "runtime/plan/planner.h"
#include "runtime/policy/policy.h"

namespace thimble {

// A recorded step over the rows of a chunk. Its segments are the embedding, the layers, and the tail, which
// computes logits.
struct ChunkProgram {
  uint32_t max_rows = 0;
  std::unique_ptr<Program> program;
};

// All programs that a session replays.
struct Programs {
  std::vector<ChunkProgram> chunks;  // ascending max_rows; rows go through the chunk buffer, then compaction
  std::unique_ptr<Program> decode;   // one row, appended to the pool, attending by selection; one segment
  // Like decode, for several rows, with the segments of a chunk. Null: chunks serve for drafts.
  std::unique_ptr<Program> draft;
  std::unique_ptr<Program> rebuild;  // like decode, after rows read again, through the chunk buffer
  std::unique_ptr<Program> embed;    // the embedding of a step's rows, as stored in the model, in `x`
  std::unique_ptr<Program> upkeep;   // scores of the waiting tokens; one segment a layer, and one for the
                                     // embedding if the tokens are read again
  std::unique_ptr<Program> evict;    // compaction of a full pool; one segment a layer
  // Exchange of entries with the store: one segment a layer, after one for the device's votes if it votes.
  std::unique_ptr<Program> recall;
  std::unique_ptr<Program> log_prob;  // log-probabilities of the targets; runs after a tail
  // For each position of a slice, the number of heads that hold it, in layers without a window. Null: every
  // layer has a window.
  std::unique_ptr<Program> kept;
  // The attention of the latest token. `watch` computes the weights of all layers, and `attended` sums them
  // for each position of a slice. The first segment is for a token that attended to every entry. The second
  // one, which exists only with a selection, is for a token that attended to its lists.
  std::unique_ptr<Program> watch, attended;

  uint64_t bytes() const;  // memory of the programs, as measured
};

class Decoder {
 public:
  Decoder(const Setting& setting, const Policies& policies, const Weights& weights, const Layout& layout);

  // Records all programs. If the device does not support an op, the error names it.
  Result<Programs> record(const Device&, Stream&) const;

  // Indices of a step's segments.
  static constexpr uint32_t kHead = 0;
  uint32_t tail() const { return 1 + shape_.layers; }

 private:
  enum class Step { kChunk, kAgain, kDecode, kDraft, kRebuild };
  using RecordOps = std::function<void(Recorder&)>;
  // Makes a program for at most `rows` rows from the ops that it is given.
  using MakeProgram =
      std::function<Status(uint32_t rows, std::unique_ptr<Program>& into, const RecordOps& ops)>;
  // The programs of steps, of work between steps, and of reports on entries and attention.
  Status make_steps(const MakeProgram&, uint32_t drafted, Programs&) const;
  Status make_upkeep(const MakeProgram&, Programs&) const;
  Status make_reports(const MakeProgram&, Programs&) const;
  void record_step(Recorder&, Step, uint32_t rows = 1) const;
  void stage(Recorder&, uint32_t segment) const;
  void embed(Recorder&) const;
  void join(Recorder&, const JoinedInput&) const;
  void layer_block(const LayerStep&, Step) const;
  void token_branch(Recorder&, uint32_t layer, const TokenBranch&) const;
  // Each mixer of the variant Mixer has its own in decoder.cpp; the linker reports a missing one.
  template <typename OneMixer>
  void mix(const LayerStep&, Step, const OneMixer&) const;
  StateArray part_of_state(const LayerStep&, uint64_t first, uint64_t bytes) const;
  void project_qkv(const LayerStep&) const;
  void project_latent(const LayerStep&) const;
  void lift_values(const LayerStep&) const;
  void append(const LayerStep&, const View& saturated, const View& positions = {}) const;
  bool grows_queries() const;
  void grow_queries(const LayerStep&, const View& positions = {}) const;
  SelectionPolicy::List select(const LayerStep&) const;
  void attend(const LayerStep&, const SelectionPolicy::List&, const View& row_index = {}) const;
  void attend_lifted(const LayerStep&, const SelectionPolicy::List&) const;
  void view(const LayerStep&, const SelectionPolicy::List&, uint32_t first, uint32_t capacity) const;
  void attend_all(const LayerStep&) const;
  void retain(const LayerStep&, Step) const;
  void compact(const LayerStep&) const;
  void merge(const LayerStep&) const;
  void keep_query(const LayerStep&) const;
  void vote_for_pages(const LayerStep&) const;
  void keep_asking(const LayerStep&) const;
  void spill(const LayerStep&, const RetentionPolicy::Scores&) const;
  void exchange(const LayerStep&) const;
  void watch(const LayerStep&, const SelectionPolicy::List&) const;
  void add_by_position(const LayerStep&, const View& weights, const SelectionPolicy::List&, bool first) const;
  void glu(Recorder&, const View& x, const Dense&) const;
  void feed_forward(const LayerStep&, const Dense&) const;
  void feed_forward(const LayerStep&, const Experts&) const;
  void feed_forward_apart(const LayerStep&, const Experts&) const;
  void experts(Recorder&, const View& x, const View& y, const Experts&) const;
  void tail_block(Recorder&) const;

  LayerStep layer_step(Recorder&, uint32_t layer, Step) const;
  const RetentionPolicy& retention(const LayerStep& l) const { return policies_.of(l.attention()); }
  // With the model's epsilon, and of d_model columns, unless `p` says otherwise.
  void norm(Recorder&, View x, const Tensor& weight, View y, RmsNormParams p = {}) const;
  void scale(Recorder&, View x, View y, ScaleParams) const;  // of d_model columns unless `cols` is set
  void add_branch(Recorder&, View x, const Tensor& w, const Tensor& bias, const Tensor& norm_weight,
                  float factor = 1) const;
  void qk_norm(const LayerStep&, const Tensor& weight, uint32_t first_column, uint32_t heads) const;
  void separate_queries(const LayerStep&) const;
  void gate(const LayerStep&) const;
  void v_norm(const LayerStep&) const;
  void head_norm(const LayerStep&, const Tensor& weight, uint32_t width, uint32_t from, uint32_t to,
                 uint32_t cols) const;
  void copy_stream(Recorder&, const View& to) const;
  void linear(Recorder&, View x, uint32_t x_stride, const Tensor& w, const Tensor& bias, View y,
              uint32_t y_stride, bool add, uint32_t rows = kStepRows, bool exact = false) const;
  void head_linear(const LayerStep&, View x, const HeadMatrices& w, View y, HeadLinearParams p) const;
  Weight passed_rows(const Tensor& table, const View& rows) const;
  View qkv_columns(uint32_t first) const;

  const Setting setting_;
  const Model& model_;
  const ModelShape& shape_;
  const SessionOptions& options_;
  const Dimensions& dimensions_;
  const Policies& policies_;
  const Weights& weights_;
  const Layout& at_;
};

}  // namespace thimble
