// Finds the sentence that a question asks about (see held.h).
//
// The weight of a word is the square of its inverse document frequency, as in the cosine of tf-idf vectors,
// with sentences as documents. So names and codes decide, and common words such as "what is the" do not.
// Words that do not occur in the text say nothing about the place and are ignored.
//
// The share that is held is the best head's share, not the mean over heads. One head is enough to keep an
// answer. If retainers give heads unequal pools, most heads hold almost nothing of any sentence.
#include "apps/held.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <string>
#include <utility>

namespace app {

namespace {

constexpr double kStandsOut = 0.4,  // share of the weight of the question's words
    kAsGood = 0.8,                  // share of the best sentence's score
    kEnough = 0.5;                  // share of a sentence's tokens
constexpr size_t kLongQuestion = 1024, kMostWords = 64;

using Words = uint64_t;  // a bit for each word of the question

// Calls `take` with each run of letters and digits. ASCII letters are in lower case.
template <typename Take>
void each_word(std::string_view text, Take take) {
  std::string word;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ' ';
    const char lower = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    const bool letter = (lower >= 'a' && lower <= 'z') || (c >= '0' && c <= '9') || (c & 0x80) != 0;
    if (letter) {
      word += lower;
    } else if (!word.empty()) {
      take(word);
      word.clear();
    }
  }
}

// The number of sentences that end before the last occurrence of the question, or 0 if it does not occur.
size_t sentences_before(std::span<const Sentence> stream, std::string_view question) {
  std::string text;
  for (const Sentence& s : stream) text += s.text;
  const size_t asked = text.rfind(question);
  size_t count = 0;
  for (size_t end = 0; asked != text.npos && count < stream.size(); ++count) {
    end += stream[count].text.size();
    if (end > asked) break;
  }
  return count;
}

bool ends_with(std::string_view sentence, char mark) {
  const size_t last = sentence.find_last_not_of(" \t\r\n");
  return last != sentence.npos && sentence[last] == mark;
}

// The words of the question that occur in each of the first `count` sentences.
std::vector<Words> find_words(std::span<const Sentence> stream, size_t count, std::string_view question) {
  std::map<std::string, Words> bits;
  each_word(question, [&](const std::string& word) {
    if (bits.size() < kMostWords) bits.emplace(word, Words{1} << bits.size());
  });
  std::vector<Words> found(count, 0);
  for (size_t i = 0; i < count; ++i) {
    if (ends_with(stream[i].text, '?')) continue;  // an earlier question does not answer anything
    each_word(stream[i].text, [&](const std::string& word) {
      if (const auto bit = bits.find(word); bit != bits.end()) found[i] |= bit->second;
    });
  }
  return found;
}

// Returns for each sentence its words' share of the weight of all words, from 0 to 1.
std::vector<double> score(const std::vector<Words>& found) {
  double weights[kMostWords], all = 0;
  for (size_t word = 0; word < kMostWords; ++word) {
    const auto with = std::count_if(found.begin(), found.end(), [=](Words w) { return w >> word & 1; });
    const double rarity =
        with ? std::log(static_cast<double>(found.size() + 1) / static_cast<double>(with)) : 0;
    all += weights[word] = rarity * rarity;
  }
  std::vector<double> scores;
  for (const Words words : found) {
    double sum = 0;
    for (Words left = words; left; left &= left - 1) sum += weights[std::countr_zero(left)];
    scores.push_back(all > 0 ? sum / all : 0);
  }
  return scores;
}

// Says how much of a sentence is still held, together with the next sentence if a colon announces it.
Subject subject_of(std::span<const Sentence> stream, size_t sentence,
                   const std::vector<std::vector<int32_t>>& heads, std::span<const float> stored) {
  const uint64_t first = stream[sentence].first;
  uint64_t count = stream[sentence].count, most = 0;
  if (ends_with(stream[sentence].text, ':') && sentence + 1 < stream.size())
    count += stream[sentence + 1].count;
  for (const std::vector<int32_t>& held : heads) most = std::max(most, count_held(held, first, count));
  double in_store = 0;
  for (uint64_t i = first; i < std::min<uint64_t>(first + count, stored.size()); ++i)
    in_store += static_cast<double>(stored[i]);
  Subject subject{sentence, static_cast<double>(most) / static_cast<double>(count),
                  in_store / static_cast<double>(count)};
  subject.gone = subject.held < kEnough && subject.stored < kEnough;
  return subject;
}

}  // namespace

uint64_t count_held(const std::vector<int32_t>& held, uint64_t first, uint64_t count) {
  const auto begin = std::lower_bound(held.begin(), held.end(), static_cast<int64_t>(first));
  const auto end = std::lower_bound(begin, held.end(), static_cast<int64_t>(first + count));
  return static_cast<uint64_t>(end - begin);
}

std::optional<Subject> find_subject(std::span<const Sentence> prompt, std::string_view question,
                                    const std::vector<std::vector<int32_t>>& heads,
                                    std::span<const float> stored) {
  if (question.empty() || question.size() > kLongQuestion) return std::nullopt;
  const std::vector<double> scores = score(find_words(prompt, sentences_before(prompt, question), question));
  const double best = scores.empty() ? 0 : *std::max_element(scores.begin(), scores.end());
  if (best < kStandsOut) return std::nullopt;
  std::optional<Subject> best_left;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] < kAsGood * best) continue;
    const Subject subject = subject_of(prompt, i, heads, stored);
    const auto left = [](const Subject& s) { return std::pair(s.held, s.stored); };
    if (!best_left || left(subject) >= left(*best_left)) best_left = subject;
  }
  return best_left;
}

}  // namespace app
