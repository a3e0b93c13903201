// Reads a text densely, in chunks. It collects the inputs of the retainers for every token, and a label for
// every token: how much the answers depend on it.
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
  // Receives the retainer inputs of a layer for the next rows of the text: [rows][cols].
  using States = std::function<void(uint32_t layer, uint32_t first, uint32_t rows, const float* states)>;

  // `text_tokens` and `tail_tokens` are the largest lengths of a text and of one tail after it. `room` is a
  // limit in bytes; 0 means none. With `weighed`, log-probabilities are those of KVzip+, which also contain
  // the length of a row's hidden state and the length of an entry's value after the output projection.
  // Returns an error that names what is missing if the room or the device's ops do not suffice. `threads` are
  // host threads, in addition to the device's; 0 means one per core. The result does not depend on it.
  static Result<std::unique_ptr<Reader>> open(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                              Retainer::Input, uint32_t text_tokens, uint32_t tail_tokens,
                                              uint64_t room, bool weighed = false, uint32_t threads = 0);
  ~Reader();

  void begin(const TrainingText&);
  // Reads the next chunk. Returns false if everything was read. If `states` is empty, no states are copied
  // from the device.
  Result<bool> step(const States& states);
  uint64_t tokens_read() const { return read_; }
  // Rows of the next chunk, or 0 if everything was read.
  uint32_t next_count() const { return read_ == text_.all_tokens() ? 0 : next_rows().count; }

  // The labels of every entry of the text, computed by the op `label`. f32 [kv head][tokens of the text].
  struct Labels {
    std::vector<float> max_logit, log_prob;
  };
  Result<Labels> labels(uint32_t layer) const;

  uint32_t state_cols() const { return cols_; }
  // Bytes that this class allocates in addition to the model's file.
  uint64_t bytes() const { return bytes_; }

 private:
  explicit Reader(uint32_t threads);
  Status allocate(std::shared_ptr<const Model>, std::shared_ptr<Device>, Retainer::Input,
                  uint32_t text_tokens, uint32_t tail_tokens, uint64_t room, bool weighed);
  Status measure_outputs();
  Status weigh_values(uint32_t layer, uint32_t rows);
  Status begin_tail();
  // The next rows to read, from the text or from a tail.
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
  // Tokens read so far, of the text and all its tails.
  uint64_t read_ = 0;
  // The tail being read, and how many of its tokens were read.
  uint32_t tail_ = 0, of_tail_ = 0;
  SequenceState state_;
  // The state at the end of the text, from which every tail starts.
  SequenceState text_state_;
  // The runs of layers with a window at that point, in the order of their views. They are restored before
  // each tail, because a tail overwrites them.
  std::vector<std::vector<std::byte>> text_runs_;
  std::vector<float> states_, values_;  // of one chunk and one layer
  // For each layer and head, the Gram matrix G of W_o's columns, [head][dh][dh]. v G v is the squared length
  // of a value v after the output projection.
  std::vector<std::vector<float>> gram_;
};

}  // namespace thimble
