// The parts of answers that come in pieces.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "apps/serve/answer.h"

namespace app::serve {

// Collects the parts of an answer: texts in brackets, thoughts in braces, calls as NAME(ARGUMENTS).
class Parts {
 public:
  void add(const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      if (part.kind != kind_) close();
      kind_ = part.kind;
      words_ += part.text;
      if (part.is_call()) out_ += part.name + "(" + part.arguments + ")";
    }
  }
  std::string take() {
    close();
    return std::move(out_);
  }

 private:
  void close() {
    if (!words_.empty()) out_ += (kind_ == Part::Kind::kText ? "[" + words_ + "]" : "{" + words_ + "}");
    words_.clear();
  }
  std::string out_, words_;
  Part::Kind kind_ = Part::Kind::kText;
};

// The parts of an answer whose first piece has `first` bytes, and the others `size` bytes.
inline std::string parts_of(const std::string& text, size_t first, size_t size, const Opening& opening,
                            const Json& tools) {
  AnswerFilter filter(opening, tools);
  Parts parts;
  parts.add(filter.push(text.substr(0, first)));
  for (size_t at = first; at < text.size(); at += size) parts.add(filter.push(text.substr(at, size)));
  parts.add(filter.finish());
  return parts.take();
}

struct Answer {
  std::string text, parts;
};

// Expects the same parts for each place where a text is cut in two, and for pieces of several sizes.
inline void expect_parts(const std::vector<Answer>& answers, const Opening& opening = {},
                         const Json& tools = Json::array()) {
  for (const Answer& answer : answers) {
    const std::string& text = answer.text;
    for (size_t cut = 0; cut <= text.size(); ++cut)
      ASSERT_EQ(parts_of(text, cut, text.size(), opening, tools), answer.parts) << cut << ": " << text;
    for (const size_t size : {1, 2, 3, 7, 16})
      ASSERT_EQ(parts_of(text, 0, size, opening, tools), answer.parts) << size << ": " << text;
  }
}

}  // namespace app::serve
