// Cuts a stream of tokens into sentences that are shown to people.
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

// Cuts `count` tokens at token borders: after the end of a sentence or a line, and in a long sentence after a
// word. `token` returns the bytes of each token and is called in order. The texts of the sentences, joined,
// are the bytes of the tokens.
std::vector<Sentence> cut_sentences(uint64_t count, const std::function<std::string(uint64_t)>& token);

}  // namespace app
