// The formats of JSON schema's keyword `format`, as regular expressions that the whole string must match.
#pragma once

#include <string>
#include <string_view>

namespace thimble::grammar {

// The expression, or an empty string if the format is not supported.
std::string format_pattern(std::string_view format);
// The supported names, for error messages.
std::string format_names();

}  // namespace thimble::grammar
