#include "templates/jinja/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "templates/jinja/value.h"
#include "text/expression.h"
#include "text/utf8.h"

namespace thimble::jinja {
namespace {

bool is_ascii(std::string_view text) {
  for (const char c : text)
    if (static_cast<uint8_t>(c) >= 0x80) return false;
  return true;
}

bool is_space(uint32_t code) {
  return (code >= 9 && code <= 13) || (code >= 0x1c && code <= 0x20) || code == 0x85 || code == 0xa0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
         code == 0x202f || code == 0x205f || code == 0x3000;
}

bool contains_character(std::string_view set, std::string_view character) {
  for (; !set.empty(); set.remove_prefix(first_code_point(set).size))
    if (set.substr(0, first_code_point(set).size) == character) return true;
  return false;
}

}  // namespace

std::string_view last_character(std::string_view text) {
  if (text.empty()) return {};
  size_t size = 1;
  while (size < 4 && size < text.size() && (static_cast<uint8_t>(text[text.size() - size]) & 0xc0) == 0x80)
    ++size;
  const std::string_view last = text.substr(text.size() - size);
  return first_code_point(last).size == size ? last : text.substr(text.size() - 1);
}

size_t character_count(std::string_view text) {
  if (is_ascii(text)) return text.size();
  size_t count = 0;
  for (; !text.empty(); text.remove_prefix(first_code_point(text).size)) ++count;
  return count;
}

std::string_view characters(std::string_view text, size_t first, size_t last) {
  if (first >= last) return {};
  if (is_ascii(text)) return text.substr(first, last - first);
  size_t at = 0, begin = text.size(), end = text.size();
  for (size_t n = 0; at < text.size(); ++n) {
    if (n == first) begin = at;
    if (n == last) {
      end = at;
      break;
    }
    at += first_code_point(text.substr(at)).size;
  }
  return text.substr(begin, end - begin);
}

std::string_view take_character(std::string_view& rest) {
  const std::string_view first = rest.substr(0, first_code_point(rest).size);
  rest.remove_prefix(first.size());
  return first;
}

size_t space_at_start(std::string_view text) {
  if (text.empty()) return 0;
  const CodePoint first = first_code_point(text);
  return is_space(first.value) ? first.size : 0;
}

size_t space_at_end(std::string_view text) {
  if (text.empty()) return 0;
  const std::string_view last = last_character(text);
  return is_space(first_code_point(last).value) ? last.size() : 0;
}

std::string_view strip_start(std::string_view text, const std::string* set) {
  while (!text.empty()) {
    const size_t size = set ? first_code_point(text).size : space_at_start(text);
    if (size == 0 || (set && !contains_character(*set, text.substr(0, size)))) break;
    text.remove_prefix(size);
  }
  return text;
}

std::string_view strip_end(std::string_view text, const std::string* set) {
  while (!text.empty()) {
    const size_t size = set ? last_character(text).size() : space_at_end(text);
    if (size == 0 || (set && !contains_character(*set, text.substr(text.size() - size)))) break;
    text.remove_suffix(size);
  }
  return text;
}

std::string_view take_line(std::string_view& rest) {
  for (size_t at = 0; at < rest.size(); ++at) {
    const std::string_view here = rest.substr(at);
    size_t end = here.starts_with("\r\n") ? 2 : here[0] == '\n' || here[0] == '\r' ? 1 : 0;
    if (here[0] == '\v' || here[0] == '\f' || (here[0] >= '\x1c' && here[0] <= '\x1e')) end = 1;
    for (const std::string_view wide : {"\xC2\x85", "\xE2\x80\xA8", "\xE2\x80\xA9"})
      if (here.starts_with(wide)) end = wide.size();
    if (end == 0) continue;
    const std::string_view line = rest.substr(0, at);
    rest.remove_prefix(at + end);
    return line;
  }
  return std::exchange(rest, {});
}

void escape(std::string_view text, TextOut& out) {
  out.reserve(text.size());
  while (!text.empty()) {
    constexpr std::string_view kSpecial = "&<>\"'";
    constexpr const char* kWritten[] = {"&amp;", "&lt;", "&gt;", "&#34;", "&#39;"};
    const size_t plain = std::min(text.find_first_of(kSpecial), text.size());
    out += text.substr(0, plain);
    if (plain < text.size()) out += kWritten[kSpecial.find(text[plain])];
    text.remove_prefix(std::min(plain + 1, text.size()));
  }
}

void quote(std::string_view text, TextOut& out) {
  const bool apostrophe = text.find('\'') != std::string_view::npos;
  const char quote = apostrophe && text.find('"') == std::string_view::npos ? '"' : '\'';
  out.reserve(text.size() + 2);
  out += quote;
  while (!text.empty()) {
    const std::string_view bytes = take_character(text);
    const uint32_t code = first_code_point(bytes).value;
    const CharClass is = char_class(code);
    const bool shows =
        code >= kInvalidUtf8 ||
        (code < 0x80 ? code >= 0x20 && code != 0x7f : is != CharClass::kOther && is != CharClass::kSpace);
    if (bytes[0] == quote || bytes[0] == '\\') {
      out += '\\';
      out += bytes;
    } else if (code == '\n' || code == '\r' || code == '\t') {
      out += code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t";
    } else if (!shows) {
      char escape[12];
      std::snprintf(escape, sizeof escape,
                    code < 0x100     ? "\\x%02x"
                    : code < 0x10000 ? "\\u%04x"
                                     : "\\U%08x",
                    static_cast<unsigned>(code));
      out += escape;
    } else {
      out += bytes;
    }
  }
  out += quote;
}

double float_beyond(std::string_view digits) { return std::strtod(std::string(digits).c_str(), nullptr); }

std::string float_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, number, std::chars_format::scientific).ptr;
  const std::string_view shortest(buffer, static_cast<size_t>(end - buffer));
  const size_t e = shortest.find('e');
  std::string sign, digits;
  for (const char c : shortest.substr(0, e)) (c == '-' ? sign : digits) += c == '.' ? "" : std::string(1, c);
  int exponent = 0;
  const size_t first = e + (shortest[e + 1] == '+' ? 2 : 1);
  std::from_chars(shortest.data() + first, end, exponent);
  if (exponent < -4 || exponent >= 16) {
    std::string out = sign + digits.substr(0, 1) + (digits.size() > 1 ? "." + digits.substr(1) : "");
    std::snprintf(buffer, sizeof buffer, "e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
    return out + buffer;
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const size_t whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0') + ".0";
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

}  // namespace thimble::jinja
