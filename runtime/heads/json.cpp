#include "runtime/heads/json.h"

#include <cctype>
#include <charconv>
#include <cstdio>

#include "runtime/tokenizer/tokenizer.h"
#include "runtime/tokenizer/utf8.h"

namespace thimble {
namespace {

constexpr uint32_t kDeepest = 64;  // values within values

// `code` is of at most 21 bits and no half of a pair.
void append_utf8(uint32_t code, std::string& out) {
  const auto add = [&](uint32_t byte) { out += static_cast<char>(byte); };
  const auto add_rest = [&](uint32_t shift) { add(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) return add(code);
  if (code < 0x800) {
    add(0xc0 | code >> 6);
  } else if (code < 0x10000) {
    add(0xe0 | code >> 12);
    add_rest(6);
  } else {
    add(0xf0 | code >> 18);
    add_rest(12);
    add_rest(6);
  }
  add_rest(0);
}

}  // namespace

Status JsonReader::wrong() const {
  return error(Code::kFormat, "%s is damaged or no JSON: byte %zu cannot be read", where_.c_str(), at_);
}

void JsonReader::pass_space() {
  while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
}

bool JsonReader::take(char c) {
  pass_space();
  if (at_ == text_.size() || text_[at_] != c) return false;
  ++at_;
  return true;
}

Status JsonReader::expect(char c) { return take(c) ? Status() : wrong(); }

Status JsonReader::end() {
  pass_space();
  return at_ == text_.size() ? Status() : wrong();
}

// The four digits of \uXXXX.
Result<uint32_t> JsonReader::code_unit() {
  uint32_t code = 0;
  const std::string_view digits = text_.substr(at_, 4);
  const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
  if (digits.size() < 4 || read.ptr != digits.data() + 4) return wrong();
  at_ += 4;
  return code;
}

// What stands behind a backslash.
Status JsonReader::escape(std::string& out) {
  if (at_ == text_.size()) return wrong();
  constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
  const char c = text_[at_++];
  if (const size_t known = kEscapes.find(c); known != std::string_view::npos) {
    out += kMeant[known];
    return {};
  }
  if (c != 'u') {
    --at_;
    return wrong();
  }
  THIMBLE_LET(code, code_unit());
  const auto is_low = [](uint32_t unit) { return unit >= 0xdc00 && unit < 0xe000; };
  if (code < 0xd800 || code >= 0xe000) {
    append_utf8(code, out);
    return {};
  }
  if (!is_low(code) && text_.substr(at_, 2) == "\\u") {
    const size_t before = at_;
    at_ += 2;
    THIMBLE_LET(low, code_unit());
    if (is_low(low)) {
      append_utf8(0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00), out);
      return {};
    }
    at_ = before;
  }
  out += kReplacement;
  return {};
}

Result<std::string> JsonReader::string() {
  THIMBLE_TRY(expect('"'));
  std::string out;
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (static_cast<uint8_t>(c) < 0x20) return wrong();
    ++at_;
    if (c == '"') return out;
    if (c == '\\')
      THIMBLE_TRY(escape(out));
    else
      out += c;
  }
  return wrong();
}

Result<uint64_t> JsonReader::uint() {
  pass_space();
  uint64_t value = 0;
  const char* end = text_.data() + text_.size();
  const auto read = std::from_chars(text_.data() + at_, end, value);
  if (read.ec != std::errc()) return wrong();
  at_ = static_cast<size_t>(read.ptr - text_.data());
  return value;
}

Status JsonReader::skip() { return skip(0); }

Status JsonReader::skip(uint32_t depth) {
  if (depth > kDeepest) return wrong();
  pass_space();
  if (at_ == text_.size()) return wrong();
  if (text_[at_] == '"') return to_status(string());
  if (text_[at_] == '{') return object([&](const std::string&) { return skip(depth + 1); });
  if (text_[at_] == '[') return array([&] { return skip(depth + 1); });
  // A number, true, false or null: whatever letters they are made of.
  const size_t first = at_;
  while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) ||
                                std::string_view("+-.").find(text_[at_]) != std::string_view::npos))
    ++at_;
  return at_ > first ? Status() : wrong();
}

std::string json_quoted(std::string_view text) {
  Utf8Stream stream;
  std::string valid, out = "\"";
  stream.push(text, valid);
  stream.finish(valid);
  for (const char c : valid) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<uint8_t>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace thimble
