// The part of regular expressions that pre-tokenizers are written in: alternatives of sets, groups and
// look-ahead over characters and their Unicode classes. Leftmost match, first alternative, greedy.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text/unicode_table.h"

namespace thimble {

// Bytes that are not UTF-8 are characters of class kOther and a value beyond Unicode.
struct Char {
  uint32_t value : 21;
  uint32_t is : 4;    // CharClass
  uint32_t size : 3;  // bytes in the text
};
static_assert(sizeof(Char) == 4);

std::vector<Char> characters(std::string_view text);
CharClass char_class(uint32_t value);

// Knows | ( ) (?: ) (?= ) (?! ) $ [ ] ? * + {n} {n,m} \s \S \p{L Lu Lt Ll Lm Lo M N P S}, and [X--[Y]] for
// what of X is not in Y. Differs from others in one way: a group is not entered again once it has matched.
// Matching goes back from the end of a run, one run at a time: for the expressions of pretokenizer.cpp that
// takes time linear in the text, whatever the text.
class Expression {
 public:
  // The pattern is well-formed: those of pretokenizer.cpp are, and no file brings its own.
  explicit Expression(std::string_view pattern);

  // Finds matches in pieces of a text, in order.
  class Search {
   public:
    Search(const Expression& expression, const std::vector<Char>& text)
        : expression_(expression), text_(text), barren_(expression.groups_.back().size()) {}
    // The first character behind the match that begins at `at`, which is before `end`; or `at`.
    size_t match(size_t at, size_t end);

   private:
    const Expression& expression_;
    const std::vector<Char>& text_;
    // Up to where an alternative is known to match nowhere. One that begins with X* or X+ and fails at the
    // front of a run of X fails within it too; to look again at each place would take quadratic time.
    std::vector<size_t> barren_;
  };

 private:
  friend class ExpressionParser;

  struct Range {
    uint32_t first, last;
  };
  struct Set {
    std::array<bool, 128> ascii = {};  // the rest is for the characters beyond
    uint32_t classes = 0;              // a bit for each CharClass
    std::vector<Range> ranges, except;
    bool negated = false;

    bool holds(uint32_t value, uint32_t is) const;
    bool has(Char c) const { return c.value < 128 ? ascii[c.value] : holds(c.value, c.is); }
  };
  struct Item {
    enum class Kind : uint8_t { kSet, kGroup, kAhead, kNotAhead, kEnd } kind;
    uint32_t index = 0;  // of its set or group
    size_t min = 1, max = 1;
  };
  using Sequence = std::vector<Item>;
  using Group = std::vector<Sequence>;  // alternatives
  struct Text {
    const Char* chars;
    size_t end;
  };

  size_t run_end(const Set&, const Text&, size_t at, size_t max) const;
  size_t match_group(const Group&, const Text&, size_t at) const;
  size_t match_from(const Item* item, const Item* last, const Text&, size_t at) const;

  std::vector<Set> sets_;
  std::vector<Group> groups_;  // the last one is the whole expression
};

}  // namespace thimble
