// JSON from untrusted clients: its size is bounded, and each field is checked, with one sentence that says
// what is wrong.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/task.h"

namespace app::serve {

// Parses any value. An integer beyond 64 bits keeps its digits: it becomes a binary value, which no field
// accepts, and which write_json() writes as it was. Its depth is bounded, because the functions that process
// values are recursive. The number of values is bounded, because values take many times the bytes of their
// text. Throws a Refusal.
Json parse_bounded(std::string_view text);
// The same for an object.
Json parse_object(std::string_view text);
// The same, but null instead of a Refusal.
Json parse_or_null(std::string_view text);
// Refuses the same texts as these functions, without making a value.
void check_json(std::string_view text);
constexpr std::string_view kJsonSpaces = " \t\r\n";
// A text without the white space around it.
std::string_view stripped(std::string_view text);
// Writes JSON on one line. Invalid UTF-8 becomes U+FFFD.
std::string write_json(const Json& json);

// These return a field, or nothing if it is missing or null. They refuse wrong types, and values outside
// [least, most].
const Json* find_field(const Json& object, const char* name);
std::optional<double> number_field(const Json& object, const char* name, double least, double most);
std::optional<int64_t> integer_field(const Json& object, const char* name, int64_t least, int64_t most);
std::optional<bool> bool_field(const Json& object, const char* name);
const std::string* text_field(const Json& object, const char* name);
const Json* array_field(const Json& object, const char* name);
const Json* object_field(const Json& object, const char* name);

// Refuses the first field that has a value and whose name is not in the list, because the server would ignore
// it.
using FieldNames = std::span<const char* const>;
void refuse_unknown(const Json& object, std::initializer_list<FieldNames> known);
// Refuses a field that would change the answer, unless its value is null or `neutral`, which asks for what
// the server does anyway.
void refuse_unless_neutral(const Json& object, const char* name, const Json& neutral);

// A JSON schema, which is an object or true, or a text that contains one.
Form schema_form(const Json& schema, const char* name);

// The messages of a conversation, of which there must be at least one.
const Json& messages_field(const Json& object);
// Up to 16 texts of at most a kilobyte each, or a single text.
std::vector<std::string> stops_field(const Json& object, const char* name);
// Concatenates the texts of a message's content, which is a text or an array of {"type": "text", "text":
// ...}.
std::string content_text(const Json& content);

}  // namespace app::serve
