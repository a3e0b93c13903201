// Converts between JSON and template values.
#pragma once

#include <string>
#include <string_view>

#include "templates/jinja/value.h"

namespace thimble::jinja {

// `where` identifies the text in messages. Integers beyond 64 bits keep their digits.
Result<Value> read_json(Heap& heap, std::string_view text, const std::string& where);
// JSON on one line, as tojson writes it.
Result<std::string> write_json(Heap& heap, const Value& value);

}  // namespace thimble::jinja
