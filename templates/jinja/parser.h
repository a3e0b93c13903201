// Parses the source of a template into a tree.
#pragma once

#include <string_view>

#include "base/status.h"
#include "templates/jinja/syntax.h"

namespace thimble::jinja {

// Returns Unsupported, with the line and the unexpected construct, if the source is not a template or uses an
// unknown statement, filter, test, function or method.
Result<Block> parse(std::string_view source);

}  // namespace thimble::jinja
