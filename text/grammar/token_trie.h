// The texts of a vocabulary in the order of their bytes, so that all tokens with the same beginning are tried
// at once.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/grammar/matcher.h"

namespace thimble {
class Tokenizer;
}

namespace thimble::grammar {

// One bit for each token.
class TokenMask {
 public:
  explicit TokenMask(uint32_t tokens = 0) : words_((tokens + 63) / 64) {}
  bool operator[](int32_t id) const {
    return words_[static_cast<uint32_t>(id) / 64] >> (static_cast<uint32_t>(id) % 64) & 1;
  }
  void set(int32_t id) {
    words_[static_cast<uint32_t>(id) / 64] |= uint64_t(1) << (static_cast<uint32_t>(id) % 64);
  }
  void clear() { words_.assign(words_.size(), 0); }
  void add(const TokenMask& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
  }
  bool none() const;
  std::span<const uint64_t> words() const { return words_; }

  bool operator==(const TokenMask&) const = default;

 private:
  std::vector<uint64_t> words_;
};

// The tokens of one trie. Nodes are in depth-first order.
struct Trie {
  struct Node {
    uint32_t after;  // the first node that is not below this one
    uint32_t ids;    // index of the first token with this text
    uint16_t depth;  // bytes of the text
    uint8_t byte;
    uint8_t count;  // tokens with this text
  };
  std::vector<Node> nodes;
  std::vector<int32_t> ids;
};

class TokenTrie {
 public:
  explicit TokenTrie(const Tokenizer& tokenizer);

  uint32_t tokens() const { return tokens_; }
  // The bytes that a token stands for; for a control token those of control_bytes(). Tokens that end a
  // generation have none.
  std::string_view text(int32_t id) const {
    return std::string_view(bytes_).substr(begins_[id], begins_[id + 1] - begins_[id]);
  }
  bool is_control(int32_t id) const {
    return id >= 0 && static_cast<uint32_t>(id) < tokens_ && text(id) == control_bytes(id);
  }
  // Tokens that end a generation.
  const std::vector<int32_t>& ends() const { return ends_; }
  const TokenMask& end_mask() const { return end_mask_; }

  // Tokens of ordinary characters (PlainSet) with at most kLongestPlain code points, and all others.
  static constexpr uint32_t kLongestPlain = 24;
  const Trie& plain() const { return plain_; }
  const Trie& other() const { return other_; }
  // Adds the plain tokens of at most `length` code points, all of which are in the set. The masks of sets are
  // remembered. Any thread may call this.
  void add_plain(const PlainSet& set, uint32_t length, TokenMask& mask) const;
  uint64_t host_bytes() const;

 private:
  uint32_t tokens_;
  std::string bytes_;
  std::vector<uint32_t> begins_;
  std::vector<int32_t> ends_;
  TokenMask end_mask_;
  Trie plain_, other_;
  // What each token of plain_.ids consists of.
  struct Made {
    PlainSet of;
    uint32_t length;
  };
  std::vector<Made> made_;
  struct PlainMasks {
    PlainSet set;
    std::vector<TokenMask> of_length;  // up to so many code points
  };
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<PlainMasks>> masks_;
  mutable size_t next_mask_ = 0;  // that is replaced when there are too many
};

}  // namespace thimble::grammar
