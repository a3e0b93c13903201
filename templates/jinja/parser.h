// The source of a template as a tree.
#pragma once

#include <string_view>

#include "base/status.h"
#include "templates/jinja/syntax.h"

namespace thimble::jinja {

// Unsupported, with the line and what was met there, where the source is no template or uses what is not
// known here: a statement, a filter, a test, a function or a method.
Result<Block> parse(std::string_view source);

}  // namespace thimble::jinja
