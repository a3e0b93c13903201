// Text to token ids and back: byte-level BPE and SentencePiece-style vocabularies of GGUF files.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace thimble {

class Gguf;

struct Token {
  int32_t id;
  uint64_t offset;  // of its first byte in the text
};

// Gets tokens in the order of the text.
using TokenSink = std::function<void(Token)>;

// Token texts are views into the file, which must outlive this object.
class Tokenizer {
 public:
  Tokenizer();  // has no tokens; ok() is false
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  static Result<Tokenizer> load(const Gguf&);
  bool ok() const { return impl_ != nullptr; }

  uint32_t size() const;
  int32_t bos() const;  // -1 if there is none
  int32_t eos() const;
  bool adds_bos() const;
  // Requests of the file that are not supported, one sentence each.
  const std::vector<std::string>& warnings() const;
  // Ids that end a generation: eos, eot, eom, pad and separator tokens of code completion, and tokens whose
  // text is known to end a turn.
  bool ends_generation(int32_t id) const;
  // Whether the token stands for its text, or for a byte, and for nothing else.
  bool is_text(int32_t id) const;
  // Ids that are never generated, whatever their logits.
  const std::vector<int32_t>& suppressed() const;

  // Accepts any bytes. Invalid UTF-8 is encoded byte by byte, and lost if the vocabulary lacks the byte.
  // `add_bos` adds BOS if the model asks for it. `parse_special` turns the text of control and unknown tokens
  // into their ids, the longest first. Text that guard() marked stays text, without the mark. User-defined
  // tokens are found in any text, unless they end a generation. `continues` says that the text follows one
  // that was tokenised up to a cut().
  void tokenize(std::string_view text, bool add_bos, bool parse_special, const TokenSink& sink,
                bool continues = false) const;
  std::vector<Token> tokenize(std::string_view text, bool add_bos, bool parse_special) const;

  // The last position up to which the text gives the same tokens whatever follows. 0 if there is no such
  // position.
  size_t cut(std::string_view text) const;

  // Inserts a kGuard before everything that `parse_special` would turn into control and unknown tokens, so
  // that untrusted text may be part of a prompt. With `but_marks`, it skips the tokens that separate the
  // parts of an answer. Returns nothing if there is nothing to guard.
  std::optional<std::string> guard(std::string_view text, bool but_marks) const;

  // Appends the bytes of a token, which may be part of a code point. Control tokens have text only if
  // `special` is set, except those that separate the parts of an answer (gpt-oss's <|channel|>). `out` is
  // never shrunk, so a reserved string avoids allocation.
  void append_piece(int32_t id, bool special, std::string& out) const;
  // The length of the longest piece in bytes, the most that append_piece can add.
  uint32_t longest_piece() const;
  // The token's text as stored in the vocabulary.
  std::string_view text(int32_t id) const;
  // The id of the token with exactly this vocabulary text, or -1.
  int32_t find(std::string_view text) const;
  // The text of several tokens. It is the inverse of encoding, so the space that the encoder added is
  // removed.
  std::string detokenize(const int32_t* ids, size_t count, bool special) const;

  uint64_t host_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Holds back the bytes of an unfinished code point, so that a stream of pieces is cut at whole code points.
// Invalid bytes are passed on as U+FFFD.
class Utf8Stream {
 public:
  // Takes bytes, and appends all complete code points to `out`.
  void push(std::string_view bytes, std::string& out);
  // Ends the stream. An unfinished code point becomes U+FFFD.
  void finish(std::string& out);
  // The bytes of an unfinished code point. Pushed to a new stream, they continue it.
  std::string_view held() const { return {held_, count_}; }

 private:
  char held_[4] = {};
  uint32_t count_ = 0;
};

}  // namespace thimble
