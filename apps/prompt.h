// Prompts as token ids. A long text stays in its file: it is read in blocks, as often as its ids are needed,
// so that what a prompt takes does not grow with the text.
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

// Gets ids in order, some at a time; false: it wants no more.
using TakeIds = std::function<bool(std::span<const int32_t>)>;

// The text of a file. Of a long one the ends are held, and between them lies the middle, in the file. Ends
// and middle become the ids that they become in the whole text. What can be read only once, standard input
// say, is held.
class LongText {
 public:
  // `parses`: what spells a control token in the middle is one.
  LongText(const Model& model, const std::string& path, bool parses);

  std::string_view begin() const { return begin_; }  // all of a short text
  std::string_view end() const { return end_; }
  bool has_middle() const { return middle_ < middle_end_; }
  uint64_t middle_tokens() const { return middle_tokens_; }
  // Gives the middle's ids. False where `take` stopped it.
  bool each_of_middle(const TakeIds& take) const;
  std::string whole() const { return read(0, size_); }

 private:
  std::string read(uint64_t at, uint64_t size) const;

  const Model& model_;
  std::string path_;
  std::unique_ptr<FILE, int (*)(FILE*)> file_;  // or, where it is null,
  std::string held_;                            // all of the text
  uint64_t size_ = 0;
  std::string begin_, end_;
  uint64_t middle_ = 0, middle_end_ = 0;  // bytes of the text
  uint64_t middle_tokens_ = 0;
  uint32_t middle_flags_ = 0;
};

// The ids of a prompt: those before and after a text's middle are held.
class Prompt {
 public:
  explicit Prompt(std::vector<int32_t> ids) : before_(std::move(ids)) {}
  // `write` puts a text into the prompt's own; `flags` are those of the prompt. Lends the text.
  Prompt(const Model& model, const LongText& text, const std::function<std::string(std::string_view)>& write,
         uint32_t flags);

  uint64_t size() const { return after_begin() + after_.size(); }
  // Gives the ids from the one with the number `first` on. False where `take` stopped it.
  bool each(uint64_t first, const TakeIds& take) const;
  // How many ids at the beginning are surely those of another prompt with the same text.
  uint64_t common(const Prompt& other) const;

 private:
  uint64_t after_begin() const { return before_.size() + (text_ ? text_->middle_tokens() : 0); }

  std::vector<int32_t> before_, after_;
  const LongText* text_ = nullptr;  // null: there is no middle
};

}  // namespace app
