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

// An open-addressing table of row numbers; the rows lie with the caller, who compares them.
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
  void insert(uint64_t hash, int32_t row);  // at most as many as were reserved
  uint64_t host_bytes() const { return slots_.capacity() * sizeof(int32_t); }

 private:
  std::vector<int32_t> slots_;  // twice the rows at least, so a search ends
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
  kMark = 7  // not of files: control, but shown, since it tells an answer's parts apart (gpt-oss)
};

// Tokens that are found as they stand, in text that is not tokenised yet.
class TokenTexts {
 public:
  void set(const std::vector<std::string_view>& texts, std::vector<int32_t> ids);
  // The longest of them that `text` begins with, or -1.
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

// Texts are views into the file.
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
  // Ids that a model must not generate, as the file says.
  const std::vector<int32_t>& suppressed() const { return suppressed_; }

  // The lowest id with this text, or -1; an empty text has none.
  int32_t find(std::string_view text) const;
  // The same for what plain text may become: never a control, mark, unknown or byte token.
  int32_t find_plain(std::string_view text) const;

  // User-defined tokens are found in any text; control, mark and unknown tokens where the caller allows it.
  const TokenTexts& user_defined() const { return user_defined_; }
  const TokenTexts& special() const { return special_; }  // with the user-defined ones

  // What the file asks for and does not get, a sentence each.
  const std::vector<std::string>& warnings() const { return warnings_; }

  uint64_t host_bytes() const;

 private:
  Status load_ids(const Gguf&);
  // `listed`: ids that the file lists as ends.
  Status load_ends(const Gguf&, const std::vector<int32_t>& listed);
  Result<int32_t> get_id(const Gguf&, const char* key, int32_t absent);
  Result<std::vector<int32_t>> get_ids(const Gguf&, const char* key);
  void pass_over(const Gguf&, const char* key, const std::string& id);  // warns of it
  int32_t first_of(std::initializer_list<std::string_view> texts) const;
  void make_control(int32_t id);
  // Takes `text` from the ends again, which becomes `type`.
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
