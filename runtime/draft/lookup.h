// Prompt lookup: the last tokens of the text are searched in the text before them, and what followed there is
// the guess.
#pragma once

#include <vector>

#include "runtime/draft/drafter.h"

namespace thimble {

class Lookup : public Drafter {
 public:
  // Remembers at least this many tokens of a text that long, whichever are the latest.
  static constexpr uint32_t kRemembered = 1 << 15;

  Lookup();
  Status note(uint64_t position, std::span<const int32_t> tokens) override;
  Result<uint32_t> guess(std::span<int32_t> draft) override;
  Status reset() override;
  Result<std::unique_ptr<Drafter>> clone() const override;
  uint64_t bytes() const override { return tokens_.capacity() * sizeof(int32_t); }
  static uint64_t planned_bytes() { return 2 * kRemembered * sizeof(int32_t); }

 private:
  std::vector<int32_t> tokens_;  // at most 2 * kRemembered; then the older half is forgotten
  uint64_t first_ = 0;           // position of tokens_[0]
};

}  // namespace thimble
