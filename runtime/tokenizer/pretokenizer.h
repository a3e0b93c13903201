// Cuts text into the pieces that byte-level BPE never merges across, as the regular expressions of each
// vocabulary do.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace thimble {

// What an expression does at a place: matches `size` bytes, or matches nowhere within them. Size is at
// least 1.
struct Step {
  size_t size;
  bool match;
};
using Pass = Step (*)(std::string_view piece, size_t at);

// A vocabulary's scheme. The expressions apply one after the other, each to the matches and the gaps that the
// ones before left behind.
struct PreTokenizer {
  const char* name;    // as in tokenizer.ggml.pre
  Pass passes[6];      // null after the last
  bool ignore_merges;  // a piece that is a token is taken whole, whatever the merges say
  bool adds_bos;       // where the file does not say
};

// Null where the name is unknown.
const PreTokenizer* find_pre_tokenizer(std::string_view name);
std::string pre_tokenizer_names();

// Calls `emit` with each piece in order; together they are the text.
void split(const PreTokenizer&, std::string_view text, const std::function<void(std::string_view)>& emit);

}  // namespace thimble
