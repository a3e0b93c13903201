// The texts that end an answer.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace app::serve {

// How many bytes at the end of a text may be the beginning of `word`.
size_t begun(std::string_view text, std::string_view word);

// Ends a text at the first of some texts, which is no part of it. What might be the beginning of one is held
// back.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  // The text that may be shown now.
  std::string push(std::string_view text);
  // What is held back, once nothing follows.
  std::string finish() { return std::exchange(held_, {}); }
  // The stop that was met; nullptr: none so far.
  const std::string* met() const { return met_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  const std::string* met_ = nullptr;
};

}  // namespace app::serve
