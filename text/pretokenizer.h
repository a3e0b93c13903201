// Cuts text into pieces that BPE never merges across, using the regular expressions of each vocabulary.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "text/expression.h"

namespace thimble {

// One pass over a piece. The matches of the expression, and the gaps between them, become separate pieces.
// With `threes`, the pattern is a set whose runs are cut only where the rest of the run is a multiple of
// three characters.
struct Pass {
  const char* pattern = nullptr;
  bool threes = false;

  constexpr Pass() = default;
  constexpr Pass(const char* p) : pattern(p) {}
  constexpr Pass(const char* p, bool t) : pattern(p), threes(t) {}
};

// Other properties of a vocabulary.
enum PreTokenizerFlags : uint8_t {
  kWhole = 1,  // a piece that is a token stays whole, even if no merges produce it
  kBos = 2,    // adds BOS if the file does not say
  kRaw = 4,  // tokens are text as in SentencePiece: a space is U+2581, and single bytes have their own tokens
};

// A pre-tokenizer. Its passes run in order, each on the pieces of the previous one.
struct PreTokenizer {
  const char* name;            // as in tokenizer.ggml.pre
  std::array<Pass, 8> passes;  // null after the last
  uint8_t flags = 0;
};

// Returns null if the name is unknown.
const PreTokenizer* find_pre_tokenizer(std::string_view name);
std::vector<std::string> pre_tokenizer_names();

// The compiled expressions of a pre-tokenizer. Threads may share an object.
class Splitter {
 public:
  explicit Splitter(const PreTokenizer&);
  // Calls `emit` with each piece in order. The pieces together are the whole text. The text is processed in
  // parts of about `part` bytes that end where a piece certainly ends, so that only a small part is held in
  // decoded form.
  void split(std::string_view text, const std::function<void(std::string_view)>& emit,
             size_t part = 1 << 16) const;
  // Whether every word of ASCII letters ends before this white space.
  bool cuts_before(char space) const { return ends_words_.find(space) != std::string::npos; }

 private:
  struct Step {
    Expression expression;
    bool threes;
  };
  struct Run;

  bool cuts_at(std::string_view text, size_t place) const;

  std::vector<Step> steps_;
  // White space before which every word of ASCII letters ends. The rest is cut as if the text began there,
  // because no expression looks back, and the end of a word depends only on where it ends.
  std::string ends_words_;
};

}  // namespace thimble
