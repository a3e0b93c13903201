// A dense reading of a text, in chunks, that keeps what a retainer would read of every token and what every
// token was worth to the answers.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "runtime/engine.h"
#include "training/texts.h"

namespace thimble {

class Observer;

class Reader {
 public:
  // Gets what a layer's retainer reads of the text's next rows: [rows][cols].
  using States = std::function<void(uint32_t layer, uint32_t first, uint32_t rows, const float* states)>;

  // For texts of at most so many tokens, and as many behind them at a time; with room for `room` bytes (0:
  // any number). `weighed`: log-probabilities are those of KVzip+, with the lengths of a row's hidden state
  // and of what an entry's value becomes. Refused, with what is missing, where the room or the device's ops
  // do not suffice. `threads`: of the host, beside the device's; 0: one a core.
  static Result<std::unique_ptr<Reader>> open(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                              Retainer::Input, uint32_t text_tokens, uint32_t tail_tokens,
                                              uint64_t room, bool weighed = false, uint32_t threads = 0);
  ~Reader();

  void begin(const TrainingText&);
  // Reads the next chunk; false where all was read. Without `states` none are fetched from the device.
  Result<bool> step(const States& states);
  uint64_t tokens_read() const { return read_; }
  // How many the next chunk has, 0 where all was read.
  uint32_t next_count() const { return read_ == text_.all_tokens() ? 0 : next_rows().count; }

  // What each entry of the text that was read was worth: the op `label`. f32 [kv head][tokens of the text].
  struct Labels {
    std::vector<float> max_logit, log_prob;
  };
  Result<Labels> labels(uint32_t layer) const;

  uint32_t state_cols() const { return cols_; }
  uint64_t bytes() const { return bytes_; }  // that this takes beside the model's file

 private:
  explicit Reader(uint32_t threads);
  Status allocate(std::shared_ptr<const Model>, std::shared_ptr<Device>, Retainer::Input,
                  uint32_t text_tokens, uint32_t tail_tokens, uint64_t room, bool weighed);
  Status measure_outputs();
  Status weigh_values(uint32_t layer, uint32_t rows);
  Status begin_tail();
  // The rows that come next: of the text or of a tail.
  struct Rows {
    const int32_t* tokens;
    uint32_t position, count;
  };
  Rows next_rows() const;
  Status run_layers(const Rows&, const States&);

  std::shared_ptr<Device> device_;
  ThreadPool threads_;
  std::unique_ptr<Engine> engine_;
  Observer* observer_ = nullptr;  // the engine's retention
  uint32_t cols_ = 0;
  uint64_t bytes_ = 0;

  TrainingText text_;
  uint64_t read_ = 0;                // of all its tokens
  uint32_t tail_ = 0, of_tail_ = 0;  // that is being read, and its tokens that were
  SequenceState state_;
  SequenceState text_state_;  // when the text was read: what each tail finds
  // The runs of layers with a window then, in the order of their views: a tail leaves nothing of them.
  std::vector<std::vector<std::byte>> text_runs_;
  std::vector<float> states_, values_;  // of one chunk and layer
  // Of each layer and head W_o's columns multiplied with each other, [head][dh][dh]: v G v is the squared
  // length of what a value v becomes.
  std::vector<std::vector<float>> gram_;
};

}  // namespace thimble
