// Reads grammars in llama.cpp's notation (GBNF).
#include <algorithm>
#include <map>

#include "text/grammar/languages.h"
#include "text/utf8.h"

namespace thimble::grammar {
namespace {

constexpr uint32_t kDeepestGroup = 100;
constexpr uint32_t kMostRepetitions = 100'000;

bool in_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

class GbnfReader {
 public:
  explicit GbnfReader(std::string_view text) : text_(text) {}

  Result<Syntax> read() {
    space(true);
    while (at_ < text_.size()) {
      THIMBLE_LET(name, this->name());
      const uint32_t rule = rule_of(name);
      if (syntax_.rules()[rule].defined) return wrong("defines a rule twice");
      if (!take("::=")) return wrong("lacks ::= after a rule's name");
      space(true);
      THIMBLE_LET(body, choice(0));
      syntax_.define(rule, body);
      if (at_ < text_.size() && !has('\n') && !has('\r')) return wrong("has a character that fits nowhere");
      space(true);
    }
    const auto root = rules_.find("root");
    if (root == rules_.end() || !syntax_.rules()[root->second].defined)
      return error(Code::kInvalidArgument, "the grammar lacks a rule \"root\"");
    syntax_.set_root(root->second);
    return std::move(syntax_);
  }

 private:
  bool has(char c) const { return at_ < text_.size() && text_[at_] == c; }
  // Skips the text, and white space after it that does not end a line.
  bool take(std::string_view expected) {
    if (!text_.substr(at_).starts_with(expected)) return false;
    at_ += expected.size();
    space(false);
    return true;
  }
  Status wrong(const char* what) const {
    size_t line = 1;
    for (const char c : text_.substr(0, at_)) line += c == '\n';
    return error(Code::kInvalidArgument, "the grammar %s, in line %zu", what, line);
  }
  // White space and comments.
  void space(bool line_ends) {
    for (; at_ < text_.size(); ++at_) {
      if (has('#'))
        while (at_ < text_.size() && !has('\n') && !has('\r')) ++at_;
      if (!(has(' ') || has('\t') || (line_ends && (has('\n') || has('\r'))))) return;
    }
  }

  Result<std::string> name() {
    const size_t first = at_;
    while (at_ < text_.size() && in_name(text_[at_])) ++at_;
    if (at_ == first) return wrong("lacks a name");
    const std::string name(text_.substr(first, at_ - first));
    space(false);
    return name;
  }

  uint32_t rule_of(const std::string& name) {
    const auto [known, is_new] = rules_.try_emplace(name, 0);
    if (is_new) known->second = syntax_.add_rule("the grammar's rule " + name);
    return known->second;
  }

  // Alternatives. Lines may end inside of parentheses, and after "|".
  Result<Expr> choice(uint32_t depth) {
    if (depth > kDeepestGroup) return wrong("nests groups too deep");
    std::vector<Expr> alternatives;
    do {
      space(true);
      THIMBLE_LET(alternative, sequence(depth));
      alternatives.push_back(alternative);
    } while (take("|"));
    return syntax_.choice(std::move(alternatives));
  }

  Result<Expr> sequence(uint32_t depth) {
    std::vector<Expr> parts;
    for (;;) {
      if (depth > 0) space(true);
      if (at_ == text_.size() || has('|') || has(')') || has('\n') || has('\r') || begins_rule()) break;
      THIMBLE_LET(part, item(depth));
      parts.push_back(part);
    }
    return syntax_.sequence(std::move(parts));
  }

  // Whether a rule's definition begins here: an alternative that is empty may end with the line.
  bool begins_rule() const {
    size_t at = at_;
    while (at < text_.size() && in_name(text_[at])) ++at;
    if (at == at_) return false;
    while (at < text_.size() && (text_[at] == ' ' || text_[at] == '\t')) ++at;
    return text_.substr(at).starts_with("::=");
  }

  Result<Expr> item(uint32_t depth) {
    THIMBLE_LET(part, atom(depth));
    uint32_t min = 0, max = kUnbounded;
    if (take("*")) {
    } else if (take("+")) {
      min = 1;
    } else if (take("?")) {
      max = 1;
    } else if (take("{")) {
      THIMBLE_TRY(counts(min, max));
    } else {
      return part;
    }
    if (has('*') || has('+') || has('?') || has('{'))
      return wrong("repeats a repetition; put it in parentheses");
    return syntax_.repeat(part, min, max);
  }

  Result<uint32_t> number(uint32_t most, const char* too_large) {
    const size_t first = at_;
    uint32_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      value = value * 10 + static_cast<uint32_t>(text_[at_] - '0');
      if (value > most) return wrong(too_large);
    }
    if (at_ == first) return wrong("lacks a number");
    space(false);
    return value;
  }
  Result<uint32_t> repetitions() {
    return number(kMostRepetitions, "repeats something more than 100000 times");
  }
  Status counts(uint32_t& min, uint32_t& max) {
    if (!has(',')) THIMBLE_SET(min, repetitions());
    max = min;
    if (take(",")) {
      max = kUnbounded;
      if (!has('}')) THIMBLE_SET(max, repetitions());
    }
    if (!take("}")) return wrong("lacks a } of a repetition");
    if (min > max) return wrong("has a repetition whose least number is larger than the largest");
    return {};
  }

  Result<Expr> atom(uint32_t depth) {
    if (has('"')) return quoted();
    if (has('[')) return bracket();
    if (take(".")) return syntax_.set({{0, kLastCode}});
    if (take("(")) {
      THIMBLE_LET(inner, choice(depth + 1));
      if (!take(")")) return wrong("lacks a )");
      return inner;
    }
    if (take("%json")) return json_schema();
    if (take("<")) return control();
    if (!in_name(text_[at_])) return wrong("has a character that fits nowhere");
    THIMBLE_LET(name, this->name());
    return syntax_.rule(rule_of(name));
  }

  // The rest of <[NUMBER]>.
  Result<Expr> control() {
    if (!take("[")) return wrong("names a token by its text, which is not supported; write <[NUMBER]>");
    THIMBLE_LET(token, number(kLargestControl, "names a token above 16777215"));
    if (!take("]") || !take(">")) return wrong("lacks ]> after the number of a token");
    return syntax_.control(static_cast<int32_t>(token));
  }

  // The value of the JSON schema that comes next, an object. Before it, the rules (QUOTE, TEXT) may say how
  // strings are written.
  Result<Expr> json_schema() {
    std::optional<JsonStrings> strings;
    if (take("(")) {
      THIMBLE_LET(quote, name());
      if (!take(",")) return wrong("lacks a comma between two rules");
      THIMBLE_LET(text, name());
      if (!take(")")) return wrong("lacks a )");
      strings = {syntax_.rule(rule_of(quote)), syntax_.rule(rule_of(text))};
    }
    const size_t first = at_;
    size_t depth = 0;
    bool quotes = false;
    do {
      if (at_ == text_.size() || (at_ == first && !has('{')))
        return wrong("lacks a JSON schema, {...}, after %json");
      if (quotes && has('\\'))
        ++at_;
      else if (has('"'))
        quotes = !quotes;
      else if (!quotes && (has('{') || has('}')))
        depth += has('{') ? 1 : SIZE_MAX;
      at_ = std::min(at_ + 1, text_.size());
    } while (depth);
    const std::string_view schema = text_.substr(first, at_ - first);
    space(false);
    return add_json_schema(syntax_, schema, strings);
  }

  Result<uint32_t> character() {
    if (at_ == text_.size() || has('\n')) return wrong("has a line that ends inside of quotes or brackets");
    const CodePoint c = first_code_point(text_.substr(at_));
    if (c.value >= kInvalidUtf8) return wrong("is not UTF-8");
    at_ += c.size;
    if (c.value != '\\') return c.value;
    if (at_ == text_.size()) return wrong("ends with a backslash");
    const char kind = text_[at_++];
    switch (kind) {
      case 'b':
        return uint32_t{'\b'};
      case 'f':
        return uint32_t{'\f'};
      case 'n':
        return uint32_t{'\n'};
      case 'r':
        return uint32_t{'\r'};
      case 't':
        return uint32_t{'\t'};
      case 'x':
        return hex(2);
      case 'u':
        return hex(4);
      case 'U':
        return hex(8);
      case '\\':
      case '"':
      case '[':
      case ']':
      case '-':
      case '^':
        return static_cast<uint32_t>(kind);
      default:
        return wrong("has an unknown escape");
    }
  }

  Result<uint32_t> hex(size_t digits) {
    uint32_t value = 0;
    for (size_t i = 0; i < digits; ++i, ++at_) {
      const char c = at_ < text_.size() ? text_[at_] : '\0';
      const bool letter = (c | 32) >= 'a' && (c | 32) <= 'f';
      if (!letter && !(c >= '0' && c <= '9')) return wrong("has an escape that lacks hexadecimal digits");
      value = value * 16 + static_cast<uint32_t>(letter ? (c | 32) - 'a' + 10 : c - '0');
    }
    if (value > kLastCode) return wrong("has an escape beyond Unicode");
    return value;
  }

  Result<Expr> quoted() {
    ++at_;
    std::vector<Expr> parts;
    while (!has('"')) {
      THIMBLE_LET(code, character());
      parts.push_back(syntax_.set({{code, code}}));
    }
    take("\"");
    return syntax_.sequence(std::move(parts));
  }

  Result<Expr> bracket() {
    ++at_;
    const bool negated = has('^');
    if (negated) ++at_;
    CodeSet set;
    while (!has(']')) {
      THIMBLE_LET(first, character());
      uint32_t last = first;
      if (has('-') && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        THIMBLE_SET(last, character());
      }
      if (last < first) return wrong("has a range in brackets that goes backwards");
      set.push_back({first, last});
    }
    take("]");
    return syntax_.set(negated ? complement(set) : set);
  }

  const std::string_view text_;
  size_t at_ = 0;
  Syntax syntax_;
  std::map<std::string, uint32_t> rules_;
};

}  // namespace

Result<Syntax> read_gbnf(std::string_view text) { return GbnfReader(text).read(); }

}  // namespace thimble::grammar
