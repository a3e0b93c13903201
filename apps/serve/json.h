// JSON from strangers: bounded, and each field checked with one sentence on what is wrong.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/task.h"

namespace app::serve {

// Any value. Its depth is bounded, since what goes through values calls itself, and so is their number, since
// they take many times the bytes of their text. Throws a Refusal.
Json parse_bounded(std::string_view text);
// The same of an object.
Json parse_object(std::string_view text);
// Refuses what these refuse, and makes no value.
void check_json(std::string_view text);
// On one line; what is no UTF-8 becomes U+FFFD.
std::string write_json(const Json& json);

// A field, or nothing where it is missing or null. Wrong types and values outside [least, most] are refused.
const Json* find_field(const Json& object, const char* name);
std::optional<double> number_field(const Json& object, const char* name, double least, double most);
std::optional<int64_t> integer_field(const Json& object, const char* name, int64_t least, int64_t most);
std::optional<bool> bool_field(const Json& object, const char* name);
const std::string* text_field(const Json& object, const char* name);
const Json* array_field(const Json& object, const char* name);
const Json* object_field(const Json& object, const char* name);

// Refuses the first field that has a value and none of these names, since nobody would read it.
using FieldNames = std::span<const char* const>;
void refuse_unknown(const Json& object, std::initializer_list<FieldNames> known);
// Refuses a field that would change the answer, unless it asks for what is done anyway or for nothing.
void refuse_unless_neutral(const Json& object, const char* name, const Json& neutral);

// The messages of a conversation: at least one.
const Json& messages_field(const Json& object);
// Up to 16 texts of a kilobyte, or one text alone.
std::vector<std::string> stops_field(const Json& object, const char* name);
// The texts of a message's content, a text or an array of {"type": "text", "text": ...}, one after the other.
std::string content_text(const Json& content);

}  // namespace app::serve
