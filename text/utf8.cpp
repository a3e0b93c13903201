#include "text/utf8.h"

#include "text/tokenizer.h"

namespace thimble {

CodePoint first_code_point(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xC2 || lead > 0xF4) return {kInvalidUtf8, 1};
  const uint32_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  uint32_t value = lead & (0x7Fu >> size);
  for (uint32_t i = 1; i < size; ++i) {
    if (i == text.size()) return {kPartialUtf8, i};
    // The range of the second byte excludes overlong forms, surrogates and values above U+10FFFF.
    const uint8_t low = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(i) < low || byte(i) > high) return {kInvalidUtf8, i};
    value = value << 6 | (byte(i) & 0x3Fu);
  }
  return {value, size};
}

void Utf8Stream::push(std::string_view bytes, std::string& out) {
  for (const char byte : bytes) {
    held_[count_++] = byte;
    // A byte that interrupts a code point may begin the next one, so this is a loop.
    while (count_ > 0) {
      const CodePoint c = first_code_point({held_, count_});
      if (c.value == kPartialUtf8) break;
      if (c.value == kInvalidUtf8) {
        out += kReplacement;
      } else {
        out.append(held_, c.size);
      }
      count_ -= c.size;
      for (uint32_t i = 0; i < count_; ++i) held_[i] = held_[i + c.size];
    }
  }
}

void Utf8Stream::finish(std::string& out) {
  if (count_ > 0) out += kReplacement;
  count_ = 0;
}

}  // namespace thimble
