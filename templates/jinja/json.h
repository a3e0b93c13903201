// JSON as values of templates.
#pragma once

#include <string>
#include <string_view>

#include "templates/jinja/value.h"

namespace thimble::jinja {

// `where` is how messages call the text. Integers beyond 64 bits become floats.
Result<Value> read_json(Heap& heap, std::string_view text, const std::string& where);
// On one line, as tojson writes it.
Result<std::string> write_json(Heap& heap, const Value& value);

}  // namespace thimble::jinja
