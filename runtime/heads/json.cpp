#include "runtime/heads/json.h"

#include <cctype>
#include <charconv>
#include <cstdio>

#include "runtime/tokenizer/tokenizer.h"

namespace thimble {
namespace {

constexpr uint32_t kDeepest = 64;  // values within values

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
    // \uXXXX: nothing that is looked for is written so, but it must be known where the string ends.
    uint32_t code = 0;
    const std::string_view digits = text_.substr(at_ + 1, 4);
    const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (text_[at_] != 'u' || digits.size() < 4 || read.ptr != digits.data() + 4) return wrong();
    out += code < 0x80 ? static_cast<char>(code) : '?';
    at_ += 4;
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
