#include "runtime/jinja/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "runtime/tokenizer/expression.h"
#include "runtime/tokenizer/utf8.h"

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

std::vector<std::string_view> split_characters(std::string_view text) {
  std::vector<std::string_view> all;
  while (!text.empty()) {
    all.push_back(text.substr(0, first_code_point(text).size));
    text.remove_prefix(all.back().size());
  }
  return all;
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

std::vector<std::string_view> split_lines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    size_t end = std::min(text.find_first_of("\n\r\v\f\x1c\x1d\x1e"), text.size());
    size_t next = std::min(end + 1, text.size());
    for (const std::string_view wide : {"\xC2\x85", "\xE2\x80\xA8", "\xE2\x80\xA9"}) {
      const size_t at = text.substr(0, end).find(wide);
      if (at == std::string_view::npos) continue;
      end = at;
      next = at + wide.size();
    }
    if (text.substr(end, 2) == "\r\n") next = end + 2;
    lines.push_back(text.substr(0, end));
    text.remove_prefix(next);
  }
  return lines;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    constexpr std::string_view kSpecial = "&<>\"'";
    constexpr const char* kWritten[] = {"&amp;", "&lt;", "&gt;", "&#34;", "&#39;"};
    const size_t special = kSpecial.find(c);
    if (special == std::string_view::npos)
      out += c;
    else
      out += kWritten[special];
  }
  return out;
}

std::string quoted(std::string_view text) {
  const bool apostrophe = text.find('\'') != std::string_view::npos;
  const char quote = apostrophe && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const Char& c : thimble::characters(text)) {
    const std::string_view bytes = text.substr(0, c.size);
    text.remove_prefix(c.size);
    const uint32_t code = first_code_point(bytes).value;
    const bool shows =
        code >= kInvalidUtf8 || (code < 0x80 ? code >= 0x20 && code != 0x7f
                                             : c.is != static_cast<uint32_t>(CharClass::kOther) &&
                                                   c.is != static_cast<uint32_t>(CharClass::kSpace));
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
  return out + quote;
}

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
