// Prompts as token ids. A long text stays in its file, which is read in blocks each time its ids are needed.
// So the memory of a prompt does not grow with the text.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/library.h"

namespace app {

// Receives ids in order, some per call. Returns false to stop.
using TakeIds = std::function<bool(std::span<const int32_t>)>;

// The text of a file. If it is long, its two ends are kept in memory, and the middle between them stays in
// the file. The ends and the middle yield the same ids as in the whole text. A file that can be read only
// once, such as standard input, is kept in memory.
class LongText {
 public:
  // `parses`: text in the middle that spells a control token becomes that token.
  LongText(const Model& model, const std::string& path, bool parses);

  std::string_view begin() const { return begin_; }  // for a short text, all of it
  std::string_view end() const { return end_; }
  bool has_middle() const { return middle_ < middle_end_; }
  uint64_t middle_tokens() const { return middle_tokens_; }
  // Passes the middle's ids to `take`. Returns false if `take` stopped it.
  bool each_of_middle(const TakeIds& take) const;
  std::string whole() const { return read(0, size_); }

 private:
  std::string read(uint64_t at, uint64_t size) const;

  const Model& model_;
  std::string path_;
  std::unique_ptr<FILE, int (*)(FILE*)> file_;  // if null, held_ is used
  std::string held_;                            // the whole text
  uint64_t size_ = 0;
  std::string begin_, end_;
  uint64_t middle_ = 0, middle_end_ = 0;  // byte offsets in the text
  uint64_t middle_tokens_ = 0;
  uint32_t middle_flags_ = 0;
};

// The ids of a prompt. The ids before and after the middle of a text are kept in memory.
class Prompt {
 public:
  explicit Prompt(std::vector<int32_t> ids) : before_(std::move(ids)) {}
  // `write` inserts the text into the text of the prompt. `flags` are the tokenizer flags of the prompt. The
  // prompt points to `text`.
  Prompt(const Model& model, const LongText& text, const std::function<std::string(std::string_view)>& write,
         uint32_t flags);

  uint64_t size() const { return after_begin() + after_.size(); }
  // Passes the ids from index `first` on to `take`. Returns false if `take` stopped it.
  bool each(uint64_t first, const TakeIds& take) const;
  // The number of leading ids that are certainly the same in another prompt with the same text.
  uint64_t common(const Prompt& other) const;

 private:
  uint64_t after_begin() const { return before_.size() + (text_ ? text_->middle_tokens() : 0); }

  std::vector<int32_t> before_, after_;
  const LongText* text_ = nullptr;  // null: the prompt has no middle
};

}  // namespace app
