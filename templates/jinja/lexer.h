// A template's source as tokens, white space control applied.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace thimble::jinja {

struct Token {
  enum class Kind {
    kText,  // what stands outside of tags
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
  std::string text;  // a string's without quotes and escapes
};

// As the environments of published templates have it: trim_blocks and lstrip_blocks are on, and one newline
// at the end of the source is dropped.
Result<std::vector<Token>> lex(std::string_view source);

}  // namespace thimble::jinja
