// The tokens of a model: texts, types, and look-up by text.
#pragma once

#include <bitset>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace thimble {

class Gguf;

// An open-addressing hash table of row numbers. The caller stores the rows and compares them.
class RowTable {
 public:
  void reserve(size_t rows);
  // The first row in the probe sequence of `hash` that satisfies `equal`, or -1.
  template <typename Equal>
  int32_t find(uint64_t hash, Equal equal) const {
    if (slots_.empty()) return -1;
    for (size_t i = hash & mask_;; i = (i + 1) & mask_)
      if (slots_[i] < 0 || equal(slots_[i])) return slots_[i];
  }
  // Insert at most as many rows as were reserved.
  void insert(uint64_t hash, int32_t row);
  uint64_t host_bytes() const { return slots_.capacity() * sizeof(int32_t); }

 private:
  std::vector<int32_t> slots_;  // at least twice the number of rows, so that a search ends
  size_t mask_ = 0;
};

uint64_t hash_bytes(std::string_view bytes);
uint64_t hash_pair(int32_t left, int32_t right);

enum class TokenType : uint8_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
  // Not a type of files: a control token that is shown, because it separates the parts of an answer
  // (gpt-oss).
  kMark = 7
};

// Token texts that are searched for in text before it is tokenised.
class TokenTexts {
 public:
  void set(const std::vector<std::string_view>& texts, std::vector<int32_t> ids);
  // The longest token text that `text` begins with, or -1.
  int32_t longest_at_start(std::string_view text) const;
  uint64_t host_bytes() const { return sorted_.capacity() * sizeof sorted_[0]; }

 private:
  struct Entry {
    std::string_view text;
    int32_t id;
  };
  std::vector<Entry> sorted_;
  std::bitset<256> first_bytes_;
};

// Token texts are views into the file.
class Vocabulary {
 public:
  static Result<Vocabulary> load(const Gguf&);

  uint32_t size() const { return static_cast<uint32_t>(texts_.size()); }
  std::string_view text(int32_t id) const { return valid(id) ? texts_[id] : std::string_view(); }
  TokenType type(int32_t id) const { return valid(id) ? types_[id] : TokenType::kControl; }
  bool valid(int32_t id) const { return id >= 0 && static_cast<size_t>(id) < texts_.size(); }
  size_t longest_text() const { return longest_text_; }
  int32_t bos() const { return bos_; }
  int32_t eos() const { return eos_; }
  int32_t unknown() const { return unknown_; }
  bool ends_generation(int32_t id) const;
  // Ids that a model must not generate, according to the file.
  const std::vector<int32_t>& suppressed() const { return suppressed_; }

  // The lowest id with this text, or -1. An empty text gives -1.
  int32_t find(std::string_view text) const;
  // Like find(), but only for tokens that plain text may become: never a control, mark, unknown or byte
  // token.
  int32_t find_plain(std::string_view text) const;

  // User-defined tokens are found in any text. Control, mark and unknown tokens are found only if the caller
  // allows it.
  const TokenTexts& user_defined() const { return user_defined_; }
  const TokenTexts& special() const { return special_; }  // includes the user-defined tokens

  // Requests of the file that are not supported, one sentence each.
  const std::vector<std::string>& warnings() const { return warnings_; }

  uint64_t host_bytes() const;

 private:
  Status load_ids(const Gguf&);
  // `listed` contains the ids that the file lists as ends.
  Status load_ends(const Gguf&, const std::vector<int32_t>& listed);
  Result<int32_t> get_id(const Gguf&, const char* key, int32_t absent);
  Result<std::vector<int32_t>> get_ids(const Gguf&, const char* key);
  void pass_over(const Gguf&, const char* key, const std::string& id);  // warns that the entry is ignored
  int32_t first_of(std::initializer_list<std::string_view> texts) const;
  void make_control(int32_t id);
  // Removes the token with this text from the ends, and sets its type to `type`.
  void drop_end(std::string_view text, TokenType type);

  std::vector<std::string_view> texts_;
  std::vector<TokenType> types_;
  RowTable by_text_;
  size_t longest_text_ = 0;
  int32_t bos_ = -1, eos_ = -1, unknown_ = -1;
  std::vector<int32_t> ends_, suppressed_;
  std::vector<std::string> warnings_;
  TokenTexts user_defined_, special_;
};

}  // namespace thimble
