// UTF-8, one code point at a time.
#pragma once

#include <cstdint>
#include <string_view>

namespace thimble {

// Values above the last code point. They stand for bytes that cannot begin a code point, and for a code point
// that is cut off at the end of the text.
inline constexpr uint32_t kInvalidUtf8 = 0x110000, kPartialUtf8 = 0x110001;
inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Marks the text of a control token that must stay text in prompts whose other control tokens are parsed
// (Tokenizer::guard). It is a noncharacter, so ordinary text does not contain it.
inline constexpr uint32_t kGuardCode = 0xFDD0;
inline constexpr std::string_view kGuard = "\xEF\xB7\x90";

struct CodePoint {
  uint32_t value;  // or kInvalidUtf8, kPartialUtf8
  uint32_t
      size;  // bytes, at least 1; of an invalid sequence, what is good of it (one U+FFFD stands for that)
};

// The first code point of `text`, which must not be empty.
CodePoint first_code_point(std::string_view text);

// Whether a terminal obeys this code point instead of showing it: C0, DEL, C1, line separators, and marks
// that change the direction of text.
inline bool is_control(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2066 && code <= 0x2069);
}

}  // namespace thimble
