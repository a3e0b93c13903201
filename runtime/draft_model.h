// Guesses tokens with a smaller model of the same vocabulary, in a session of its own. That session reads a
// window of the text, and only once a guess is wanted.
#pragma once

#include <memory>
#include <vector>

#include "runtime/draft/drafter.h"
#include "runtime/session.h"

namespace thimble {

// If its session fails or is interrupted, it forgets the text so far and has no guess.
class DraftModel : public Drafter {
 public:
  // `target`: the resolved options of the session for which it drafts. `target_vocab`: its tokens.
  static Result<std::unique_ptr<Drafter>> create(const SessionOptions& target, uint32_t target_vocab,
                                                 std::shared_ptr<Device>);

  Status note(uint64_t position, std::span<const int32_t> tokens) override;
  void read() override;
  Result<uint32_t> guess(std::span<int32_t> draft) override;
  void interrupt() override { session_->interrupt(); }
  Status reset() override;
  Result<std::unique_ptr<Drafter>> clone() const override;
  uint64_t bytes() const override { return bytes_; }

 private:
  DraftModel(std::unique_ptr<Session>, uint64_t bytes, uint32_t target_vocab);
  void note(int32_t token);
  void go_back(uint64_t position);
  void start_at(uint64_t position);
  bool read_waiting();

  std::unique_ptr<Session> session_;
  uint64_t bytes_ = 0;
  uint32_t target_vocab_;
  uint64_t first_ = 0,
           end_ = 0;  // positions of the text: where the session's text begins, and after what was noted
  std::vector<int32_t> waiting_;  // the last of the noted tokens, which the session has not been given
  std::vector<int32_t> ahead_;    // guesses that the session read after them; then nothing waits
};

}  // namespace thimble
