// A stream of tokens in sentences, for people to look at.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace app {

struct Sentence {
  std::string text;
  uint64_t first = 0, count = 0;  // tokens
};

// Cuts `count` tokens, whose bytes `token` gives in turn, at their borders: after what ends a sentence, or a
// line; long ones where a word ends. The texts joined are the tokens' bytes.
std::vector<Sentence> cut_sentences(uint64_t count, const std::function<std::string(uint64_t)>& token);

}  // namespace app
