#include "text/json.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>

#include "text/tokenizer.h"

namespace thimble {
namespace {

constexpr uint32_t kDeepest = 64;  // nesting depth of values

}  // namespace

Status JsonReader::wrong() const {
  return error(Code::kFormat, "%s is damaged or not JSON: byte %zu cannot be read", where_.c_str(), at_);
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

Result<std::string> JsonReader::string() {
  THIMBLE_TRY(expect('"'));
  std::string out;
  for (; at_ < text_.size(); ++at_) {
    if (text_[at_] == '"') {
      ++at_;
      return out;
    }
    if (static_cast<uint8_t>(text_[at_]) < 0x20) return wrong();
    if (text_[at_] != '\\') {
      out += text_[at_];
      continue;
    }
    if (++at_ == text_.size()) return wrong();
    constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
    if (const size_t known = kEscapes.find(text_[at_]); known != std::string_view::npos) {
      out += kMeant[known];
      continue;
    }
    THIMBLE_LET(code, escape());
    append_utf8(out, code);
  }
  return wrong();
}

Result<uint32_t> JsonReader::escape() {
  const auto unit = [&](size_t u) -> int64_t {
    uint32_t code = 0;
    const std::string_view digits = text_.substr(std::min(u + 1, text_.size()), 4);
    const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (text_[u] != 'u' || digits.size() < 4 || read.ptr != digits.data() + 4) return -1;
    return code;
  };
  const int64_t first = unit(at_);
  if (first < 0) return wrong();
  at_ += 4;
  if (first < 0xd800 || first > 0xdfff) return static_cast<uint32_t>(first);
  constexpr uint32_t kReplacement = 0xfffd;  // replaces an unpaired surrogate
  if (first > 0xdbff || text_.substr(at_ + 1, 2) != "\\u") return kReplacement;
  const int64_t second = unit(at_ + 2);
  if (second < 0xdc00 || second > 0xdfff) return second < 0 ? Result<uint32_t>(wrong()) : kReplacement;
  at_ += 6;
  return static_cast<uint32_t>(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00));
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
  return to_status(word());
}

char JsonReader::peek() {
  pass_space();
  return at_ < text_.size() ? text_[at_] : '\0';
}

Result<std::string_view> JsonReader::word() {
  pass_space();
  const size_t first = at_;
  while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) ||
                                std::string_view("+-.").find(text_[at_]) != std::string_view::npos))
    ++at_;
  if (at_ == first) return wrong();
  return text_.substr(first, at_ - first);
}

void append_utf8(std::string& out, uint32_t code) {
  const auto tail = [&](uint32_t bits) { out += static_cast<char>(0x80 | (bits & 0x3f)); };
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xc0 | code >> 6);
    tail(code);
  } else if (code < 0x10000) {
    out += static_cast<char>(0xe0 | code >> 12);
    tail(code >> 6);
    tail(code);
  } else {
    out += static_cast<char>(0xf0 | code >> 18);
    tail(code >> 12);
    tail(code >> 6);
    tail(code);
  }
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
