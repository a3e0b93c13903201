#include "templates/jinja/lexer.h"

#include <algorithm>
#include <charconv>

#include "templates/jinja/text.h"
#include "text/json.h"

namespace thimble::jinja {
namespace {

using Kind = Token::Kind;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

// Converts newlines to \n and drops one at the end.
std::string normalised(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r' && i + 1 < source.size() && source[i + 1] == '\n') continue;
    out += source[i] == '\r' ? '\n' : source[i];
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalised(source)), rest_(source_) {}
  Result<std::vector<Token>> run();

 private:
  Status text_and_tag();
  Status comment();
  // raw() reads {% raw %} up to {% endraw %} as plain text. raw_tag() returns the length of the tag if one
  // of that name begins at this place, otherwise 0.
  Status raw();
  size_t raw_tag(size_t at, std::string_view name) const;
  Status tag(Kind end);
  Status expression_token();
  Status string();
  Status escape(std::string& out);
  void number();
  void add_text(std::string_view text, char tag, char sign);
  void end_tag(size_t size, bool strips, bool trims);
  // The length of the tag end that the text continues with, "}}" or "%}" with its sign; otherwise 0.
  size_t tag_end(std::string_view mark) const;
  void add(Kind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text)}); }
  void pass(size_t size) {
    line_ += static_cast<uint32_t>(
        std::count(rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(size), '\n'));
    if (size) line_starts_ = rest_[size - 1] == '\n';
    rest_.remove_prefix(size);
  }
  Status fail(const char* what) const { return error(Code::kUnsupported, "line %u: %s", line_, what); }

  const std::string source_;
  std::string_view rest_;
  uint32_t line_ = 1;
  bool line_starts_ = true;  // the previous token ended with a newline
  std::string open_;         // open brackets inside a tag
  std::vector<Token> tokens_;
};

Result<std::vector<Token>> Lexer::run() {
  while (!rest_.empty()) THIMBLE_TRY(text_and_tag());
  add(Kind::kEnd, "");
  return std::move(tokens_);
}

// Adds the text before a tag. `sign` is the character after the tag's mark.
void Lexer::add_text(std::string_view text, char tag, char sign) {
  std::string_view kept = text;
  if (sign == '-') {
    kept = strip_end(text, nullptr);
  } else if (sign != '+' && tag != '{') {
    // lstrip_blocks: drop the white space before a tag if the line has nothing else before it.
    const size_t newline = text.rfind('\n');
    const size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
    if ((begin > 0 || line_starts_) && strip_end(text.substr(begin), nullptr).empty())
      kept = text.substr(0, begin);
  }
  if (!kept.empty()) add(Kind::kText, std::string(kept));
  pass(text.size());
}

Status Lexer::text_and_tag() {
  size_t at = 0;
  for (;; ++at) {
    at = rest_.find('{', at);
    if (at == std::string_view::npos || at + 1 == rest_.size()) {
      add(Kind::kText, std::string(rest_));
      pass(rest_.size());
      return {};
    }
    if (std::string_view("{%#").find(rest_[at + 1]) != std::string_view::npos) break;
  }
  const char tag_kind = rest_[at + 1];
  const char after = at + 2 < rest_.size() ? rest_[at + 2] : '\0';
  const char sign = after == '-' || after == '+' ? after : '\0';
  add_text(rest_.substr(0, at), tag_kind, sign);
  if (tag_kind == '#') return comment();
  if (tag_kind == '%' && raw_tag(0, "raw")) return raw();
  const bool prints = tag_kind == '{';
  add(prints ? Kind::kPrintBegin : Kind::kBlockBegin, "");
  pass(sign ? 3 : 2);
  return tag(prints ? Kind::kPrintEnd : Kind::kBlockEnd);
}

void Lexer::end_tag(size_t size, bool strips, bool trims) {
  pass(size);
  if (strips)
    while (const size_t space = space_at_start(rest_)) pass(space);
  else if (trims && rest_.substr(0, 1) == "\n")
    pass(1);
}

Status Lexer::comment() {
  const size_t end = rest_.find("#}", 2);
  if (end == std::string_view::npos) return fail("a comment has no end; write #}");
  const char sign = end > 2 ? rest_[end - 1] : '\0';
  end_tag(end + 2, sign == '-', sign != '+');
  return {};
}

size_t Lexer::raw_tag(size_t at, std::string_view name) const {
  if (rest_.substr(at, 2) != "{%") return 0;
  const size_t begin = at;
  at += 2;
  if (at < rest_.size() && (rest_[at] == '-' || rest_[at] == '+')) ++at;
  while (const size_t space = space_at_start(rest_.substr(at))) at += space;
  if (!rest_.substr(at).starts_with(name)) return 0;
  at += name.size();
  while (const size_t space = space_at_start(rest_.substr(at))) at += space;
  const bool plus = name == "endraw" && rest_.substr(at).starts_with("+%}");
  if (plus || rest_.substr(at).starts_with("-%}")) ++at;
  return rest_.substr(at).starts_with("%}") ? at + 2 - begin : 0;
}

Status Lexer::raw() {
  const uint32_t first = line_;
  const size_t begin = raw_tag(0, "raw");
  end_tag(begin, rest_[begin - 3] == '-', false);
  for (size_t at = 0; (at = rest_.find("{%", at)) != std::string_view::npos; ++at) {
    const size_t end = raw_tag(at, "endraw");
    if (!end) continue;
    const char before = rest_[at + 2], after = rest_[at + end - 3];
    add_text(rest_.substr(0, at), '%', before);
    end_tag(end, after == '-', after != '+');
    return {};
  }
  line_ = first;
  return fail("the statement that begins here has no {% endraw %}");
}

size_t Lexer::tag_end(std::string_view mark) const {
  if (rest_.starts_with(mark)) return mark.size();
  if ((rest_[0] == '-' || (rest_[0] == '+' && mark == "%}")) && rest_.substr(1).starts_with(mark))
    return mark.size() + 1;
  return 0;
}

Status Lexer::tag(Kind end) {
  const uint32_t first = line_;
  const bool prints = end == Kind::kPrintEnd;
  open_.clear();
  while (!rest_.empty()) {
    if (const size_t size = open_.empty() ? tag_end(prints ? "}}" : "%}") : 0) {
      const char sign = size == 3 ? rest_[0] : '\0';
      add(end, "");
      end_tag(size, sign == '-', !prints && sign != '+');
      return {};
    }
    THIMBLE_TRY(expression_token());
  }
  line_ = first;
  return fail(prints ? "a tag has no end; write }}" : "a tag has no end; write %}");
}

void Lexer::number() {
  size_t size = 0;
  const std::string_view prefix = rest_.substr(0, 2);
  for (const std::string_view known : {"0x", "0X", "0o", "0O", "0b", "0B"}) {
    if (prefix != known) continue;
    const std::string_view digits = known[1] == 'x' || known[1] == 'X'   ? "0123456789abcdefABCDEF_"
                                    : known[1] == 'o' || known[1] == 'O' ? "01234567_"
                                                                         : "01_";
    size = std::min(rest_.find_first_not_of(digits, 2), rest_.size());
    if (size == 2) break;
    std::string text(rest_.substr(0, size));
    std::erase(text, '_');
    text[1] = static_cast<char>(text[1] | 0x20);  // to lower case
    add(Kind::kInteger, std::move(text));
    pass(size);
    return;
  }
  size = 0;
  const auto digits = [&] {
    while (size < rest_.size() && (is_digit(rest_[size]) || (rest_[size] == '_' && size > 0))) ++size;
  };
  digits();
  Kind kind = Kind::kInteger;
  if (size + 1 < rest_.size() && rest_[size] == '.' && is_digit(rest_[size + 1])) {
    kind = Kind::kFloat;
    ++size;
    digits();
  }
  if (size < rest_.size() && (rest_[size] == 'e' || rest_[size] == 'E')) {
    size_t exponent = size + 1;
    if (exponent < rest_.size() && (rest_[exponent] == '-' || rest_[exponent] == '+')) ++exponent;
    if (exponent < rest_.size() && is_digit(rest_[exponent])) {
      kind = Kind::kFloat;
      size = exponent;
      digits();
    }
  }
  std::string text(rest_.substr(0, size));
  std::erase(text, '_');
  add(kind, std::move(text));
  pass(size);
}

Status Lexer::expression_token() {
  const char c = rest_[0];
  if (const size_t space = space_at_start(rest_)) {
    pass(space);
    return {};
  }
  if (is_letter(c)) {
    size_t size = 1;
    while (size < rest_.size() && (is_letter(rest_[size]) || is_digit(rest_[size]))) ++size;
    add(Kind::kName, std::string(rest_.substr(0, size)));
    pass(size);
    return {};
  }
  if (is_digit(c)) {
    number();
    return {};
  }
  if (c == '"' || c == '\'') return string();
  for (const std::string_view op : {"==", "!=", ">=", "<=", "//", "**"}) {
    if (!rest_.starts_with(op)) continue;
    add(Kind::kOperator, std::string(op));
    pass(op.size());
    return {};
  }
  if (std::string_view("+-*/%~()[]{}<>=.:|,").find(c) == std::string_view::npos)
    return fail("a character is not allowed in a tag");
  if (c == '(' || c == '[' || c == '{') open_ += c == '(' ? ')' : c == '[' ? ']' : '}';
  if (c == ')' || c == ']' || c == '}') {
    if (open_.empty() || open_.back() != c) return fail("a closing bracket has no opening one");
    open_.pop_back();
  }
  add(Kind::kOperator, std::string(1, c));
  pass(1);
  return {};
}

Status Lexer::string() {
  const char quote = rest_[0];
  const uint32_t first = line_;
  std::string out;
  pass(1);
  while (!rest_.empty() && rest_[0] != quote) {
    if (rest_[0] == '\\') {
      THIMBLE_TRY(escape(out));
      continue;
    }
    const size_t size = std::min(rest_.find_first_of(quote == '"' ? "\"\\" : "'\\"), rest_.size());
    out += rest_.substr(0, size);
    pass(size);
  }
  if (rest_.empty()) {
    line_ = first;
    return fail("a string has no end");
  }
  pass(1);
  tokens_.push_back({Kind::kString, first, std::move(out)});
  return {};
}

// Reads a backslash and the characters that belong to it, as Python does.
Status Lexer::escape(std::string& out) {
  if (rest_.size() < 2) return fail("a string has no end");
  const char c = rest_[1];
  constexpr std::string_view kEscapes = "\\'\"abfnrtv", kMeant = "\\'\"\a\b\f\n\r\t\v";
  size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
  uint32_t base = 16, skipped = 2;
  if (c >= '0' && c <= '7') {
    base = 8;
    skipped = 1;
    for (digits = 1;
         digits < 3 && digits + 1 < rest_.size() && rest_[1 + digits] >= '0' && rest_[1 + digits] <= '7';)
      ++digits;
  }
  if (digits) {
    uint32_t code = 0;
    const std::string_view number = rest_.substr(skipped, digits);
    const auto read =
        std::from_chars(number.data(), number.data() + number.size(), code, static_cast<int>(base));
    if (number.size() < digits || read.ptr != number.data() + digits || code > 0x10ffff || code >> 11 == 0x1b)
      return fail("an escape in a string is not a character");
    append_utf8(out, code);
    pass(skipped + digits);
    return {};
  }
  if (const size_t known = kEscapes.find(c); known != std::string_view::npos)
    out += kMeant[known];
  else if (c == 'N')
    return fail("characters by name (\\N) are not supported in strings");
  else if (c != '\n')
    out.append({'\\', c});
  pass(2);
  return {};
}

}  // namespace

Result<std::vector<Token>> lex(std::string_view source) { return Lexer(source).run(); }

}  // namespace thimble::jinja
