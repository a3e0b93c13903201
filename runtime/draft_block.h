// Guesses tokens with a layer of the model's own file that was trained for that (multi-token prediction). For
// each token the layer reads its embedding, and the model's last row for the token before it. It has a pool
// of its own for a window of the text.
#pragma once

#include <memory>
#include <vector>

#include "runtime/draft/drafter.h"
#include "runtime/engine.h"

namespace thimble {

// A token without a row before it has no entry: the first of a text, or after a rewind. If a step fails,
// the layer forgets all entries and guesses nothing.
class DraftBlock : public Drafter {
 public:
  // `target`: the resolved options of the session for which it drafts.
  static Result<std::unique_ptr<Drafter>> create(const std::shared_ptr<const Model>&,
                                                 const SessionOptions& target, std::shared_ptr<Device>);

  Status note(uint64_t position, std::span<const int32_t> tokens) override;
  void follow(uint64_t position, const View& rows) override;
  void read() override;
  Result<uint32_t> guess(std::span<int32_t> draft) override;
  Status reset() override;
  Result<std::unique_ptr<Drafter>> clone() const override;
  uint64_t bytes() const override { return bytes_; }

 private:
  // `most_waiting`: tokens that may wait.
  DraftBlock(std::unique_ptr<Engine>, uint64_t bytes, uint64_t most_waiting);
  uint64_t end() const { return next_ + waiting_.size(); }
  View slice(const View& of, uint64_t first, uint64_t count) const;
  void go_back(uint64_t position);
  void keep_entries(uint32_t count);
  Status read_waiting(uint32_t count, bool logits);
  Status run(uint64_t position, std::span<const int32_t> tokens, bool logits);
  Status run(const Step&);
  Status make_room(uint32_t rows);
  Result<uint32_t> guess_on(std::span<int32_t> draft);

  std::unique_ptr<Engine> engine_;
  SequenceState state_;
  uint64_t bytes_ = 0;
  uint64_t next_ = 0;             // position of the next token to read
  std::vector<int32_t> waiting_;  // the tokens from there on
  // Rows of the model that wait, in layout().model_rows: the first is that of the token before the next one.
  uint32_t rows_ = 0;
  std::vector<int32_t> positions_;  // of entries; scratch memory
};

}  // namespace thimble
