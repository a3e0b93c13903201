// JSON, read from front to back: the caller says what it expects, and makes of it what it needs.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace thimble {

class JsonReader {
 public:
  // `where` is how error messages call the text: "config.json".
  JsonReader(std::string_view text, std::string where) : text_(text), where_(std::move(where)) {}

  // Calls `member(name)`, a function that reads the member's value, for each member of an object.
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
  // Calls `element()`, a function that reads an element, for each one of an array.
  template <typename Element>
  Status array(Element element) {
    THIMBLE_TRY(expect('['));
    if (take(']')) return {};
    do THIMBLE_TRY(element());
    while (take(','));
    return expect(']');
  }
  // In UTF-8; half of a surrogate pair becomes U+FFFD.
  Result<std::string> string();
  Result<uint64_t> uint();
  // The first character of the value that comes next, '\0' at the end.
  char peek();
  // What is no object, array or string: "12", "-0.5e3", "true", "null". Which of them, is the caller's to
  // check.
  Result<std::string_view> word();
  // Passes over a value of any kind.
  Status skip();
  // That nothing follows but white space.
  Status end();
  // The error that the text cannot be read here.
  Status wrong() const;

 private:
  void pass_space();
  // Passes over `c` where that is next, white space before it left out.
  bool take(char c);
  Status expect(char c);
  // The code point of the escape \uXXXX whose u is next, and of a second one that makes a pair with it.
  Result<uint32_t> escape();
  Status skip(uint32_t depth);

  std::string_view text_;
  size_t at_ = 0;
  std::string where_;
};

// Appends a code point as UTF-8.
void append_utf8(std::string& out, uint32_t code);

// A text as JSON has it, in quotes; what is not UTF-8 becomes U+FFFD.
std::string json_quoted(std::string_view text);

}  // namespace thimble
