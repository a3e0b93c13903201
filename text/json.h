// A JSON reader that goes from front to back: the caller says what it expects and builds its own values. A
// JSON writer for objects and arrays.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace thimble {

class JsonReader {
 public:
  // `where` names the text in error messages: "config.json".
  JsonReader(std::string_view text, std::string where) : text_(text), where_(std::move(where)) {}

  // Calls `member(name)` for each member of an object. `member` must read the member's value.
  template <typename Member>
  Status object(Member member) {
    THIMBLE_TRY(expect('{'));
    if (take('}')) return {};
    do {
      THIMBLE_LET(name, string());
      THIMBLE_TRY(expect(':'));
      THIMBLE_TRY(member(name));
    } while (take(','));
    return expect('}');
  }
  // Calls `element()` for each element of an array. `element` must read the element.
  template <typename Element>
  Status array(Element element) {
    THIMBLE_TRY(expect('['));
    if (take(']')) return {};
    do THIMBLE_TRY(element());
    while (take(','));
    return expect(']');
  }
  // The string is UTF-8. An unpaired surrogate becomes U+FFFD.
  Result<std::string> string();
  Result<uint64_t> uint();
  // The first character of the next value, or '\0' at the end.
  char peek();
  // Reads a value that is not an object, array or string: "12", "-0.5e3", "true", "null". The caller checks
  // which of them it is.
  Result<std::string_view> word();
  // Skips a value of any kind.
  Status skip();
  // Checks that only white space follows.
  Status end();
  // The error for text that cannot be read at this position.
  Status wrong() const;

 private:
  void pass_space();
  // Skips white space, then `c` if it is next. Returns whether it was.
  bool take(char c);
  Status expect(char c);
  // Reads the escape \uXXXX from its u on, and a second escape if both form a surrogate pair. Returns the
  // code point.
  Result<uint32_t> escape();
  Status skip(uint32_t depth);

  std::string_view text_;
  size_t at_ = 0;
  std::string where_;
};

// Appends a code point as UTF-8.
void append_utf8(std::string& out, uint32_t code);

// `text` as a JSON string in quotes. Invalid UTF-8 becomes U+FFFD.
std::string json_quoted(std::string_view text);

// Writes an object or array from front to back.
class JsonWriter {
 public:
  // Members of an object.
  void text(std::string_view name, std::string_view value) { raw(name, json_quoted(value)); }
  void number(std::string_view name, uint64_t value) { raw(name, std::to_string(value)); }
  void raw(std::string_view name, const std::string& json) { element(json_quoted(name) + ": " + json); }
  // An element of an array.
  void element(const std::string& json) { text_ += (text_.empty() ? "" : ", ") + json; }

  std::string object() const { return "{" + text_ + "}"; }
  std::string array() const { return "[" + text_ + "]"; }
  bool empty() const { return text_.empty(); }

 private:
  std::string text_;
};

}  // namespace thimble
