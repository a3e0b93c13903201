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

// Texts of tokens are views into the file, which must outlive this.
class Tokenizer {
 public:
  Tokenizer();  // knows no token; ok() is false
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  static Result<Tokenizer> load(const Gguf&);
  bool ok() const { return impl_ != nullptr; }

  uint32_t size() const;
  int32_t bos() const;  // -1 where there is none
  int32_t eos() const;
  bool adds_bos() const;
  // What the file asks for and does not get, a sentence each.
  const std::vector<std::string>& warnings() const;
  // Ids that end a generation: eos, eot, eom, code completion's pad and separators, and the tokens whose text
  // is known to end a turn.
  bool ends_generation(int32_t id) const;
  // Ids that are never generated, whatever their logits.
  const std::vector<int32_t>& suppressed() const;

  // Any bytes are accepted: what is not UTF-8 is encoded byte by byte (and lost where the vocabulary lacks a
  // byte). `add_bos` adds BOS where the model asks for one; `parse_special` turns the text of control and
  // unknown tokens into their ids, the longest first, but where guard() marked it: that stays text, without
  // the mark. User-defined tokens are part of any text, unless they end a generation. `continues`: the text
  // follows one that was tokenised up to a cut().
  void tokenize(std::string_view text, bool add_bos, bool parse_special, const TokenSink& sink,
                bool continues = false) const;
  std::vector<Token> tokenize(std::string_view text, bool add_bos, bool parse_special) const;

  // The last place up to which the text becomes the same tokens by itself, whatever follows; 0: none is sure.
  size_t cut(std::string_view text) const;

  // The text with a kGuard in front of all that `parse_special` would turn into control and unknown tokens,
  // but with `but_marks` not of those that tell an answer's parts apart; nothing where there is none. So what
  // others wrote may stand in a prompt.
  std::optional<std::string> guard(std::string_view text, bool but_marks) const;

  // The bytes of a token, maybe part of a code point; control tokens give their text only when `special`,
  // but for those that tell an answer's parts apart (gpt-oss's <|channel|>).
  // `out` is appended to and never shrinks, so a reserved string takes it without allocating.
  void append_piece(int32_t id, bool special, std::string& out) const;
  // The longest piece in bytes: what append_piece can add at most.
  uint32_t longest_piece() const;
  // The token's text as the vocabulary has it.
  std::string_view text(int32_t id) const;
  // The id of exactly this vocabulary text, or -1.
  int32_t find(std::string_view text) const;
  // The text of many tokens: as the encoder's inverse, so the space that it put in front is taken away again.
  std::string detokenize(const int32_t* ids, size_t count, bool special) const;

  uint64_t host_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Holds back the bytes of an unfinished code point, so that a stream of pieces is cut at whole ones.
// Bytes that can never become one are passed on as U+FFFD.
class Utf8Stream {
 public:
  // Takes bytes and appends to `out` what is complete.
  void push(std::string_view bytes, std::string& out);
  // The stream ends: an unfinished code point becomes U+FFFD.
  void finish(std::string& out);
  // The bytes of an unfinished code point, which a new stream may be given to go on.
  std::string_view held() const { return {held_, count_}; }

 private:
  char held_[4] = {};
  uint32_t count_ = 0;
};

}  // namespace thimble
