#include "text/expression.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "text/utf8.h"

namespace thimble {
namespace {

constexpr size_t kNowhere = std::numeric_limits<size_t>::max();
constexpr size_t kAnyNumber = std::numeric_limits<size_t>::max();

constexpr CharClass search_class(uint32_t value) {
  const auto after = std::upper_bound(std::begin(kCharRanges), std::end(kCharRanges), value,
                                      [](uint32_t v, const CharRange& range) { return v < range.first; });
  if (after == std::begin(kCharRanges) || value > std::prev(after)->last) return CharClass::kOther;
  return std::prev(after)->is;
}

constexpr auto kAscii = [] {
  std::array<CharClass, 128> classes{};
  for (uint32_t i = 0; i < 128; ++i) classes[i] = search_class(i);
  return classes;
}();

constexpr uint32_t bit_of(CharClass c) { return 1u << static_cast<uint32_t>(c); }

// The classes that \p{name} stands for, one bit each.
uint32_t classes_named(std::string_view name) {
  const uint32_t upper = bit_of(CharClass::kUpper), title = bit_of(CharClass::kTitle),
                 lower = bit_of(CharClass::kLower), modifier = bit_of(CharClass::kModifier),
                 letter = bit_of(CharClass::kLetter);
  if (name == "L") return upper | title | lower | modifier | letter;
  if (name == "Lu") return upper;
  if (name == "Lt") return title;
  if (name == "Ll") return lower;
  if (name == "Lm") return modifier;
  if (name == "Lo") return letter;
  if (name == "M") return bit_of(CharClass::kMark);
  if (name == "N") return bit_of(CharClass::kNumber);
  return bit_of(name == "P" ? CharClass::kPunctuation : CharClass::kSymbol);
}

}  // namespace

CharClass char_class(uint32_t value) { return value < 128 ? kAscii[value] : search_class(value); }

std::vector<Char> characters(std::string_view text) {
  std::vector<Char> out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = first_code_point(text.substr(at));
    const CharClass is = char_class(c.value);
    out.push_back({c.value & 0x1FFFFF, static_cast<uint32_t>(is) & 0xF, c.size & 7});
    at += c.size;
  }
  return out;
}

class ExpressionParser {
 public:
  ExpressionParser(std::string_view pattern, Expression& out) : rest_(pattern), out_(out) {}

  // Parses alternatives up to a closing parenthesis or the end.
  uint32_t group() {
    Expression::Group alternatives(1);
    while (!rest_.empty() && rest_[0] != ')') {
      if (take("|")) {
        alternatives.emplace_back();
      } else {
        alternatives.back().push_back(item());
      }
    }
    out_.groups_.push_back(std::move(alternatives));
    return static_cast<uint32_t>(out_.groups_.size() - 1);
  }

 private:
  using Kind = Expression::Item::Kind;
  using Set = Expression::Set;

  bool take(std::string_view token) {
    if (!rest_.starts_with(token)) return false;
    rest_.remove_prefix(token.size());
    return true;
  }

  uint32_t character() {
    const CodePoint c = first_code_point(rest_);
    rest_.remove_prefix(c.size);
    return c.value;
  }

  size_t number() {
    size_t value = 0;
    for (; rest_[0] >= '0' && rest_[0] <= '9'; rest_.remove_prefix(1))
      value = value * 10 + static_cast<size_t>(rest_[0] - '0');
    return value;
  }

  Expression::Item item() {
    if (take("$")) return {Kind::kEnd};
    const Kind kind = take("(?=")                ? Kind::kAhead
                      : take("(?!")              ? Kind::kNotAhead
                      : take("(?:") || take("(") ? Kind::kGroup
                                                 : Kind::kSet;
    Expression::Item item{kind};
    item.index = kind == Kind::kSet ? set() : group();
    if (kind != Kind::kSet) take(")");
    if (take("?")) {
      item.min = 0;
    } else if (take("*")) {
      item.min = 0, item.max = kAnyNumber;
    } else if (take("+")) {
      item.max = kAnyNumber;
    } else if (take("{")) {
      item.min = item.max = number();
      if (take(",")) item.max = number();
      take("}");
    }
    return item;
  }

  uint32_t set() {
    Set set;
    if (take("[")) {
      set.negated = take("^");
      while (!take("]")) {
        if (take("--[")) {
          while (!take("]")) member(set, set.except);
        } else {
          member(set, set.ranges);
        }
      }
    } else if (take("\\S")) {
      set.negated = true;
      set.classes = bit_of(CharClass::kSpace);
    } else {
      member(set, set.ranges);
    }
    for (uint32_t c = 0; c < 128; ++c) set.ascii[c] = set.holds(c, static_cast<uint32_t>(kAscii[c]));
    out_.sets_.push_back(std::move(set));
    return static_cast<uint32_t>(out_.sets_.size() - 1);
  }

  // Parses a member of a set: a class, a character, or a range.
  void member(Set& set, std::vector<Expression::Range>& ranges) {
    if (take("\\s")) {
      set.classes |= bit_of(CharClass::kSpace);
    } else if (take("\\p{")) {
      const size_t end = rest_.find('}');
      set.classes |= classes_named(rest_.substr(0, end));
      rest_.remove_prefix(end + 1);
    } else {
      const uint32_t first = literal();
      const bool range = rest_.size() > 1 && rest_[0] == '-' && rest_[1] != ']' && rest_[1] != '-';
      if (range) rest_.remove_prefix(1);
      ranges.push_back({first, range ? literal() : first});
    }
  }

  uint32_t literal() {
    if (!take("\\")) return character();
    const uint32_t c = character();
    return c == 'n' ? '\n' : c == 'r' ? '\r' : c == 't' ? '\t' : c;
  }

  std::string_view rest_;
  Expression& out_;
};

Expression::Expression(std::string_view pattern) { ExpressionParser(pattern, *this).group(); }

bool Expression::Set::holds(uint32_t value, uint32_t is) const {
  const auto within = [value](const Range& r) { return value >= r.first && value <= r.last; };
  const bool in = (classes >> is & 1) || std::any_of(ranges.begin(), ranges.end(), within);
  return (in && std::none_of(except.begin(), except.end(), within)) != negated;
}

size_t Expression::run_end(const Set& set, const Text& text, size_t at, size_t max) const {
  const size_t end = text.end - at > max ? at + max : text.end;
  while (at < end && set.has(text.chars[at])) ++at;
  return at;
}

size_t Expression::match_group(const Group& group, const Text& text, size_t at) const {
  for (const Sequence& s : group)
    if (const size_t end = match_from(s.data(), s.data() + s.size(), text, at); end != kNowhere) return end;
  return kNowhere;
}

size_t Expression::match_from(const Item* item, const Item* last, const Text& text, size_t at) const {
  if (item == last) return at;
  switch (item->kind) {
    case Item::Kind::kEnd:
      return at == text.end ? match_from(item + 1, last, text, at) : kNowhere;
    case Item::Kind::kAhead:
    case Item::Kind::kNotAhead: {
      const bool there = match_group(groups_[item->index], text, at) != kNowhere;
      if (there != (item->kind == Item::Kind::kAhead)) return kNowhere;
      return match_from(item + 1, last, text, at);
    }
    case Item::Kind::kGroup: {
      for (size_t count = 0; count < item->max; ++count) {
        const size_t end = match_group(groups_[item->index], text, at);
        if (end == kNowhere && count < item->min) return kNowhere;
        if (end == kNowhere || end == at) break;
        at = end;
      }
      return match_from(item + 1, last, text, at);
    }
    case Item::Kind::kSet: {
      const size_t longest = run_end(sets_[item->index], text, at, item->max);
      if (longest < at + item->min) return kNowhere;
      for (size_t end = longest;; --end) {
        const size_t found = match_from(item + 1, last, text, end);
        if (found != kNowhere || end == at + item->min) return found;
      }
    }
  }
  return kNowhere;
}

size_t Expression::Search::match(size_t at, size_t end) {
  const Text text = {text_.data(), end};
  const Group& alternatives = expression_.groups_.back();
  for (size_t i = 0; i < alternatives.size(); ++i) {
    if (at < barren_[i]) continue;
    const Sequence& s = alternatives[i];
    const size_t found = expression_.match_from(s.data(), s.data() + s.size(), text, at);
    if (found != kNowhere) return found;
    const Item& first = s.front();
    if (first.kind == Item::Kind::kSet && first.max == kAnyNumber)
      barren_[i] = expression_.run_end(expression_.sets_[first.index], text, at, kAnyNumber);
  }
  return at;
}

}  // namespace thimble
