// Scores an answer by the share of the expected texts that it contains.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace app {

// Normalises a text for comparison: lower-cases ASCII letters, and removes white space. Also removes marks
// that group digits ("1,234,567", "1'234'567", "1_234_567", or thin spaces) if they stand between digits.
inline std::string comparable(std::string_view text) {
  // No-break, thin and narrow no-break space; the typographic apostrophe.
  constexpr std::array<std::string_view, 3> kSpaces = {"\u00A0", "\u2009", "\u202F"};
  constexpr std::array<std::string_view, 4> kMarks = {",", "'", "_", "\u2019"};
  const auto starts = [&](size_t at,
                          const auto& words) -> size_t {  // the length of the mark that starts there
    for (std::string_view word : words)
      if (text.compare(at, word.size(), word) == 0) return word.size();
    return 0;
  };
  const auto digit = [&](size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '9'; };
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (const size_t space = starts(i, kSpaces)) {
      i += space;
      continue;
    }
    const size_t mark = starts(i, kMarks);
    if (mark && i > 0 && digit(i - 1) && digit(i + mark)) {
      i += mark;
      continue;
    }
    const char c = text[i++];
    if (c == ' ' || (c >= '\t' && c <= '\r')) continue;
    out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return out;
}

// The share of the expected texts that occur in the answer.
inline double share_found(std::string_view answer, const std::vector<std::string>& expected) {
  const std::string text = comparable(answer);
  size_t found = 0;
  for (const std::string& part : expected) found += text.find(comparable(part)) != std::string::npos;
  return static_cast<double>(found) / static_cast<double>(expected.size());
}

// The mean of scores between 0 and 1, and its standard error.
class Mean {
 public:
  void add(double score) {
    ++count_;
    sum_ += score;
    squares_ += score * score;
  }
  uint64_t count() const { return count_; }
  double mean() const { return count_ ? sum_ / static_cast<double>(count_) : 0; }
  // Computes the error as if there were one more score of 0 and one more of 1, so that a few equal scores do
  // not give an error of 0. For scores that are 0 or 1 this is sqrt(p (1 - p) / n) with p = (right + 1) / n
  // and n = count + 2.
  double standard_error() const {
    const double n = static_cast<double>(count_) + 2, p = (sum_ + 1) / n;
    return std::sqrt(std::max(0.0, (squares_ + 1) / n - p * p) / n);
  }

 private:
  uint64_t count_ = 0;
  double sum_ = 0, squares_ = 0;
};

}  // namespace app
