// Reads regular expressions as ECMAScript writes them, without what is not regular (back-references) and
// without look-around and word boundaries.
#include <algorithm>

#include "text/expression.h"
#include "text/grammar/languages.h"
#include "text/json.h"
#include "text/utf8.h"

namespace thimble::grammar {
namespace {

constexpr uint32_t kDeepestGroup = 100;
constexpr uint32_t kMostRepetitions = 100'000;

const CodeSet kDigits = {{'0', '9'}};
const CodeSet kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const CodeSet kSpaces = {{9, 13},          {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                         {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                         {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
const CodeSet kLineEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

class RegexReader {
 public:
  RegexReader(Syntax& syntax, std::string_view pattern, const Written& written)
      : syntax_(syntax), text_(pattern), written_(written) {}

  Result<Expr> read(Match match) {
    THIMBLE_LET(whole, choice(0, match));
    if (at_ < text_.size()) return wrong("has a ) without a (");
    return whole;
  }

 private:
  bool has(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool take(std::string_view expected) {
    if (!text_.substr(at_).starts_with(expected)) return false;
    at_ += expected.size();
    return true;
  }
  Status wrong(const char* what) const {
    return error(Code::kInvalidArgument, "the regular expression %s, at byte %zu", what, at_);
  }
  Status unsupported(const char* what) const {
    return error(Code::kUnsupported, "the regular expression has %s, which is not supported, at byte %zu",
                 what, at_);
  }

  // Alternatives up to the end or a closing parenthesis. `match` matters only outside of groups.
  Result<Expr> choice(uint32_t depth, Match match) {
    if (depth > kDeepestGroup) return unsupported("groups that are nested too deep");
    std::vector<Expr> alternatives;
    do {
      THIMBLE_LET(alternative, sequence(depth, match));
      alternatives.push_back(alternative);
    } while (take("|"));
    return syntax_.choice(std::move(alternatives));
  }

  Result<Expr> sequence(uint32_t depth, Match match) {
    std::vector<Expr> parts;
    const bool from_start = depth == 0 && take("^");
    bool to_end = false;
    while (at_ < text_.size() && !has('|') && !has(')')) {
      if (depth == 0 && has('$') && (at_ + 1 == text_.size() || text_[at_ + 1] == '|')) {
        ++at_;
        to_end = true;
        break;
      }
      THIMBLE_LET(part, item(depth));
      parts.push_back(part);
    }
    if (match == Match::kAnywhere) {
      const Expr any = syntax_.repeat(written_({{0, kLastCode}}), 0, kUnbounded);
      if (!from_start) parts.insert(parts.begin(), any);
      if (!to_end) parts.push_back(any);
    }
    return syntax_.sequence(std::move(parts));
  }

  Result<Expr> item(uint32_t depth) {
    THIMBLE_LET(part, atom(depth));
    uint32_t min = 0, max = kUnbounded;
    if (take("*")) {
    } else if (take("+")) {
      min = 1;
    } else if (take("?")) {
      max = 1;
    } else if (has_counts()) {
      THIMBLE_TRY(counts(min, max));
    } else {
      return part;
    }
    take("?");  // a lazy repetition matches the same texts
    if (has('+')) return unsupported("a possessive repetition");
    if (has('*') || has('?') || has_counts()) return wrong("repeats a repetition");
    return syntax_.repeat(part, min, max);
  }

  bool has_counts() const { return has('{') && at_ + 1 < text_.size() && is_digit(text_[at_ + 1]); }

  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  Result<uint32_t> number() {
    uint32_t value = 0;
    if (at_ >= text_.size() || !is_digit(text_[at_])) return wrong("lacks a number");
    for (; at_ < text_.size() && is_digit(text_[at_]); ++at_) {
      value = value * 10 + static_cast<uint32_t>(text_[at_] - '0');
      if (value > kMostRepetitions) return unsupported("a repetition of more than 100000");
    }
    return value;
  }
  Status counts(uint32_t& min, uint32_t& max) {
    ++at_;
    THIMBLE_SET(min, number());
    max = min;
    if (take(",")) {
      max = kUnbounded;
      if (!has('}')) THIMBLE_SET(max, number());
    }
    if (!take("}")) return wrong("lacks a } of a repetition");
    if (min > max) return wrong("has a repetition whose least number is larger than the largest");
    return {};
  }

  Result<Expr> atom(uint32_t depth) {
    if (take("(")) {
      if (take("?")) {
        if (take("<")) {
          if (has('=') || has('!')) return unsupported("look-behind");
          while (at_ < text_.size() && !has('>')) ++at_;
          if (!take(">")) return wrong("lacks a > of a group's name");
        } else if (!take(":")) {
          return has('=') || has('!') ? unsupported("look-ahead") : unsupported("a group of this kind");
        }
      }
      THIMBLE_LET(inner, choice(depth + 1, Match::kWhole));
      if (!take(")")) return wrong("lacks a )");
      return inner;
    }
    if (take("[")) return bracket();
    if (take(".")) return written_(complement(kLineEnds));
    if (has('^') || has('$')) return unsupported("an anchor inside");
    if (has('*') || has('+') || has('?')) return wrong("repeats nothing");
    if (take("\\")) {
      THIMBLE_LET(set, escape(false));
      return written_(set);
    }
    THIMBLE_LET(code, character());
    return written_({{code, code}});
  }

  Result<uint32_t> character() {
    const CodePoint c = first_code_point(text_.substr(at_));
    if (c.value >= kInvalidUtf8) return wrong("is not UTF-8");
    at_ += c.size;
    return c.value;
  }

  Result<uint32_t> hex(size_t digits) {
    uint32_t value = 0;
    for (size_t i = 0; i < digits; ++i, ++at_) {
      const char c = at_ < text_.size() ? text_[at_] : '\0';
      if (is_digit(c))
        value = value * 16 + static_cast<uint32_t>(c - '0');
      else if ((c | 32) >= 'a' && (c | 32) <= 'f')
        value = value * 16 + static_cast<uint32_t>((c | 32) - 'a' + 10);
      else
        return wrong("has an escape that lacks hexadecimal digits");
    }
    return value;
  }

  // After \u.
  Result<uint32_t> code_escape() {
    if (take("{")) {
      size_t digits = 0;
      while (at_ + digits < text_.size() && text_[at_ + digits] != '}') ++digits;
      if (digits == 0 || digits > 6) return wrong("has an escape that lacks hexadecimal digits");
      THIMBLE_LET(code, hex(digits));
      if (!take("}")) return wrong("lacks a } of an escape");
      if (code > kLastCode) return wrong("has an escape beyond Unicode");
      return code;
    }
    THIMBLE_LET(first, hex(4));
    if (first < 0xD800 || first > 0xDBFF || !take("\\u")) return first;
    THIMBLE_LET(second, hex(4));
    if (second < 0xDC00 || second > 0xDFFF) return wrong("has half of a surrogate pair");
    return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
  }

  // \p{L} or \p{Lu}: after \p.
  Result<CodeSet> property() {
    if (!take("{")) return wrong("lacks a { after \\p");
    const size_t end = text_.find('}', at_);
    if (end == std::string_view::npos) return wrong("lacks a } of a property");
    const std::string_view name = text_.substr(at_, end - at_);
    using C = CharClass;
    const std::pair<std::string_view, std::vector<C>> known[] = {
        {"L", {C::kUpper, C::kTitle, C::kLower, C::kModifier, C::kLetter}},
        {"Lu", {C::kUpper}},
        {"Lt", {C::kTitle}},
        {"Ll", {C::kLower}},
        {"Lm", {C::kModifier}},
        {"Lo", {C::kLetter}},
        {"M", {C::kMark}},
        {"N", {C::kNumber}},
        {"P", {C::kPunctuation}},
        {"S", {C::kSymbol}}};
    for (const auto& [is, classes] : known) {
      if (is != name) continue;
      at_ = end + 1;
      CodeSet set;
      for (const CharRange& r : kCharRanges)
        if (std::find(classes.begin(), classes.end(), r.is) != classes.end())
          set.push_back({r.first, r.last});
      return normal(set);
    }
    return unsupported("a property other than L, Lu, Lt, Ll, Lm, Lo, M, N, P and S");
  }

  // After a backslash.
  Result<CodeSet> escape(bool in_bracket) {
    if (at_ == text_.size()) return wrong("ends with a backslash");
    const char c = text_[at_];
    const auto one = [this](uint32_t code) {
      ++at_;
      return CodeSet{{code, code}};
    };
    const auto named = [this](CodeSet set) {
      ++at_;
      return set;
    };
    switch (c) {
      case 'd':
        return named(kDigits);
      case 'D':
        return named(complement(kDigits));
      case 'w':
        return named(kWord);
      case 'W':
        return named(complement(kWord));
      case 's':
        return named(kSpaces);
      case 'S':
        return named(complement(kSpaces));
      case 't':
        return one('\t');
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      case '0':
        return one(0);
      case 'x': {
        ++at_;
        THIMBLE_LET(code, hex(2));
        return CodeSet{{code, code}};
      }
      case 'u': {
        ++at_;
        THIMBLE_LET(code, code_escape());
        return CodeSet{{code, code}};
      }
      case 'p':
      case 'P': {
        ++at_;
        THIMBLE_LET(set, property());
        return c == 'P' ? complement(set) : set;
      }
      default:
        break;
    }
    if (c == 'b' && in_bracket) return one('\b');
    if (c == 'b' || c == 'B') return unsupported("a word boundary");
    if (is_digit(c) || c == 'k') return unsupported("a back-reference");
    if ((c | 32) >= 'a' && (c | 32) <= 'z') return unsupported("an unknown escape");
    THIMBLE_LET(code, character());
    return CodeSet{{code, code}};
  }

  // After [.
  Result<Expr> bracket() {
    const bool negated = take("^");
    CodeSet set;
    while (!take("]")) {
      if (at_ == text_.size()) return wrong("lacks a ]");
      THIMBLE_LET(first, bracket_part());
      const bool single = first.size() == 1 && first[0].first == first[0].last;
      if (single && has('-') && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        THIMBLE_LET(last, bracket_part());
        if (last.size() != 1 || last[0].first != last[0].last || last[0].first < first[0].first)
          return wrong("has a range in brackets that goes backwards");
        first[0].last = last[0].first;
      }
      set.insert(set.end(), first.begin(), first.end());
    }
    return written_(negated ? complement(set) : normal(set));
  }

  Result<CodeSet> bracket_part() {
    if (take("\\")) return escape(true);
    THIMBLE_LET(code, character());
    return CodeSet{{code, code}};
  }

  Syntax& syntax_;
  const std::string_view text_;
  size_t at_ = 0;
  const Written& written_;
};

}  // namespace

Result<Expr> add_regex(Syntax& syntax, std::string_view pattern, Match match, const Written& written) {
  return RegexReader(syntax, pattern, written).read(match);
}

Result<Syntax> read_regex(std::string_view pattern) {
  Syntax syntax;
  const uint32_t root = syntax.add_rule("the regular expression");
  const Written written = [&](CodeSet set) { return syntax.set(std::move(set)); };
  THIMBLE_LET(body, add_regex(syntax, pattern, Match::kWhole, written));
  syntax.define(root, body);
  syntax.set_root(root);
  return syntax;
}

}  // namespace thimble::grammar
