// Cuts tokens into sentences (see sentences.h).
#include "apps/sentences.h"

#include <string_view>

namespace app {

namespace {

// Tokens of a sentence: from kLong on it is cut after a word, from kTooLong on after any character.
constexpr uint64_t kLong = 48, kTooLong = 96;

constexpr std::string_view kSpace = " \t\r\n";

constexpr std::string_view kEnds[] = {".", "!", "?", "…", ":"},  // if white space follows
    kEndsAnyway[] = {"。", "！", "？"}, kClosing[] = {"\"", "'", ")", "]", "”", "’", "»", "」"};

// The mark that a text ends with, or "".
template <size_t n>
std::string_view ending(std::string_view text, const std::string_view (&marks)[n]) {
  for (const std::string_view mark : marks) {
    if (text.ends_with(mark)) return mark;
  }
  return "";
}

// Whether a text's last sentence is complete, including its closing quotes and brackets.
bool is_over(std::string_view text, bool space, std::string_view next) {
  for (size_t closing; (closing = ending(text, kClosing).size()) > 0;) text.remove_suffix(closing);
  if (space) return !ending(text, kEnds).empty() || !ending(text, kEndsAnyway).empty();
  return !ending(text, kEndsAnyway).empty() && ending(next, kClosing) != next;
}

// Whether a sentence ends before `next`, which contains more than white space.
bool ends_between(const Sentence& sentence, std::string_view next) {
  const std::string_view text = sentence.text;
  const size_t last = text.find_last_not_of(kSpace);
  if (last == text.npos) return false;
  const std::string_view rest = text.substr(last + 1);
  const bool space = !rest.empty() || kSpace.find(next.front()) != kSpace.npos;
  if (rest.find('\n') != rest.npos || is_over(text.substr(0, last + 1), space, next)) return true;
  const bool inside_character = (next.front() & 0xC0) == 0x80;
  return (sentence.count >= kLong && space) || (sentence.count >= kTooLong && !inside_character);
}

}  // namespace

std::vector<Sentence> cut_sentences(uint64_t count, const std::function<std::string(uint64_t)>& token) {
  std::vector<Sentence> sentences;
  for (uint64_t i = 0; i < count; ++i) {
    const std::string next = token(i);
    const bool blank = next.find_first_not_of(kSpace) == next.npos;
    if (sentences.empty() || (!blank && ends_between(sentences.back(), next)))
      sentences.push_back({"", i, 0});
    sentences.back().text += next;
    ++sentences.back().count;
  }
  return sentences;
}

}  // namespace app
