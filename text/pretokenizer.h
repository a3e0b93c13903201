// Cuts text into the pieces that BPE never merges across, as the regular expressions of each vocabulary do.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "text/expression.h"

namespace thimble {

// An expression, whose matches and the gaps between them become pieces of their own; or with `threes` a set,
// whose runs are cut where the rest of the run is a multiple of three characters, at no other place.
struct Pass {
  const char* pattern = nullptr;
  bool threes = false;

  constexpr Pass() = default;
  constexpr Pass(const char* p) : pattern(p) {}
  constexpr Pass(const char* p, bool t) : pattern(p), threes(t) {}
};

// What else a vocabulary does.
enum PreTokenizerFlags : uint8_t {
  kWhole = 1,  // a piece that is a token is taken whole, whatever the merges say
  kBos = 2,    // BOS is put in front where the file does not say
  kRaw = 4,    // tokens are text as in SentencePiece: spaces are U+2581, bytes are tokens of their own
};

// A row: the passes apply one after the other, each to the pieces that the ones before left behind.
struct PreTokenizer {
  const char* name;            // as in tokenizer.ggml.pre
  std::array<Pass, 8> passes;  // null after the last
  uint8_t flags = 0;
};

// Null where the name is unknown.
const PreTokenizer* find_pre_tokenizer(std::string_view name);
std::vector<std::string> pre_tokenizer_names();

// Its expressions, ready to be applied; shared by threads.
class Splitter {
 public:
  explicit Splitter(const PreTokenizer&);
  // Calls `emit` with each piece in order; together they are the text. A text is taken apart in parts of
  // about `part` bytes, where it is sure that a piece ends, so that little of it is held in another form.
  void split(std::string_view text, const std::function<void(std::string_view)>& emit,
             size_t part = 1 << 16) const;
  // Whether every word of ASCII letters ends in front of this white space.
  bool cuts_before(char space) const { return ends_words_.find(space) != std::string::npos; }

 private:
  struct Step {
    Expression expression;
    bool threes;
  };
  struct Run;

  bool cuts_at(std::string_view text, size_t place) const;

  std::vector<Step> steps_;
  // White space in front of which every word of ASCII letters ends. What follows is cut as if the text began
  // with it, since no expression looks back; and no word's end depends on more than that it ends.
  std::string ends_words_;
};

}  // namespace thimble
