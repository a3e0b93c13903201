// Stop texts, which end an answer.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace app::serve {

// The number of bytes at the end of a text that may be the beginning of `word`.
size_t begun(std::string_view text, std::string_view word);

// Ends a text before the first of several stop texts. Holds back the end of the text while it may be the
// beginning of a stop.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  // Returns the text that may be shown now.
  std::string push(std::string_view text);
  // Returns the text that is held back. Called when no more text follows.
  std::string finish() { return std::exchange(held_, {}); }
  // The stop that ended the text; nullptr: none so far.
  const std::string* met() const { return met_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  const std::string* met_ = nullptr;
};

}  // namespace app::serve
