// Splits a template's source into tokens and applies white space control.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace thimble::jinja {

struct Token {
  enum class Kind {
    kText,  // text outside of tags
    kPrintBegin,
    kPrintEnd,  // {{ }}
    kBlockBegin,
    kBlockEnd,  // {% %}
    kName,
    kString,
    kInteger,
    kFloat,
    kOperator,
    kEnd
  };
  Kind kind;
  uint32_t line;
  std::string text;  // a string without quotes, its escapes resolved
};

// Uses the settings that published templates expect: trim_blocks and lstrip_blocks are on, and one newline at
// the end of the source is dropped.
Result<std::vector<Token>> lex(std::string_view source);

}  // namespace thimble::jinja
