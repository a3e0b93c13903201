// The languages in which a grammar can be given.
#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "base/status.h"
#include "text/grammar/syntax.h"

namespace thimble::grammar {

// A JSON schema: the values that it describes, as JSON texts. docs/grammars.md says which keywords are
// supported. Errors name the place in the schema: "#/properties/age".
Result<Syntax> read_json_schema(std::string_view schema);
// A regular expression that the whole text must match.
Result<Syntax> read_regex(std::string_view pattern);
// How strings are written if not as in JSON: without escapes, between two texts of `quote`. A string that may
// be any is then one of `text`. Names of members stand without quotes if they can.
struct JsonStrings {
  Expr quote, text;
};
// The same as read_json_schema(), added to a syntax. The result is the expression of the value. `strings`:
// how strings are written; nothing: as in JSON.
Result<Expr> add_json_schema(Syntax& syntax, std::string_view schema,
                             const std::optional<JsonStrings>& strings = {});
// A grammar in llama.cpp's notation. The whole text must match its rule "root".
Result<Syntax> read_gbnf(std::string_view text);

// Makes the expression of one code point of a set, as the text is written: in a JSON string, for example, a
// quote is written with a backslash.
using Written = std::function<Expr(CodeSet)>;

// Whether the expression must match all of a text, or may match anywhere in it, as `pattern` of JSON schema.
enum class Match { kWhole, kAnywhere };

// Adds a regular expression to a syntax. Errors name the byte of the pattern.
Result<Expr> add_regex(Syntax& syntax, std::string_view pattern, Match match, const Written& written);

}  // namespace thimble::grammar
