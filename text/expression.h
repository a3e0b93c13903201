// The subset of regular expressions that pre-tokenizers use: alternatives of sets, groups and look-ahead over
// characters and their Unicode classes. Matching is leftmost and greedy, and takes the first alternative that
// matches.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text/unicode_table.h"

namespace thimble {

// A byte that is not UTF-8 becomes a character of class kOther with a value beyond Unicode.
struct Char {
  uint32_t value : 21;
  uint32_t is : 4;    // CharClass
  uint32_t size : 3;  // bytes in the text
};
static_assert(sizeof(Char) == 4);

std::vector<Char> characters(std::string_view text);
CharClass char_class(uint32_t value);

// Supports | ( ) (?: ) (?= ) (?! ) $ [ ] ? * + {n} {n,m} \s \S \p{L Lu Lt Ll Lm Lo M N P S}, and [X--[Y]] for
// the characters of X that are not in Y. It differs from other engines in one way: it does not enter a group
// again after the group has matched. Matching backtracks from the end of a run, one run at a time. For the
// expressions of pretokenizer.cpp this takes linear time on any text.
class Expression {
 public:
  // The pattern must be well-formed. Those of pretokenizer.cpp are, and files cannot supply patterns.
  explicit Expression(std::string_view pattern);

  // Finds matches in pieces of a text, in order.
  class Search {
   public:
    Search(const Expression& expression, const std::vector<Char>& text)
        : expression_(expression), text_(text), barren_(expression.groups_.back().size()) {}
    // Returns the end of the match that begins at `at`, which must be less than `end`. Returns `at` if
    // nothing matches.
    size_t match(size_t at, size_t end);

   private:
    const Expression& expression_;
    const std::vector<Char>& text_;
    // For each alternative, the position up to which it cannot match. An alternative that begins with X* or
    // X+ and fails at the start of a run of X also fails inside the run. Trying each position would take
    // quadratic time.
    std::vector<size_t> barren_;
  };

 private:
  friend class ExpressionParser;

  struct Range {
    uint32_t first, last;
  };
  struct Set {
    std::array<bool, 128> ascii = {};  // other characters use `classes` and the ranges
    uint32_t classes = 0;              // one bit per CharClass
    std::vector<Range> ranges, except;
    bool negated = false;

    bool holds(uint32_t value, uint32_t is) const;
    bool has(Char c) const { return c.value < 128 ? ascii[c.value] : holds(c.value, c.is); }
  };
  struct Item {
    enum class Kind : uint8_t { kSet, kGroup, kAhead, kNotAhead, kEnd } kind;
    uint32_t index = 0;  // index of its set or group
    size_t min = 1, max = 1;
  };
  using Sequence = std::vector<Item>;
  using Group = std::vector<Sequence>;  // the alternatives
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
