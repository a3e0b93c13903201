// Texts as in Python's str: lengths and indices count characters, storage is UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace thimble::jinja {

class TextOut;

// Number of characters; a byte that does not begin one counts as one.
size_t character_count(std::string_view text);
// The characters from `first` to `last` (exclusive), both at most character_count().
std::string_view characters(std::string_view text, size_t first, size_t last);
// Removes the first character of `rest`, which is not empty, and returns it.
std::string_view take_character(std::string_view& rest);
std::string_view last_character(std::string_view text);

// Length in bytes of the white space character at the start, or end, of `text`; 0 if there is none.
size_t space_at_start(std::string_view text);
size_t space_at_end(std::string_view text);
// Removes characters of `set` from the ends, or white space if `set` is null.
std::string_view strip_start(std::string_view text, const std::string* set);
std::string_view strip_end(std::string_view text, const std::string* set);

// Removes the first line of `rest`, which is not empty, with its line ending. Returns it without the ending.
std::string_view take_line(std::string_view& rest);
// Escapes for HTML: &lt; for <.
void escape(std::string_view text, TextOut& out);
// The text in quotes as Python writes it in a list: 'it'.
void quote(std::string_view text, TextOut& out);
// The value of a number that from_chars() reported as out of range: infinity or 0.
double float_beyond(std::string_view digits);
// The shortest digits that parse to the same number, in Python's notation: 0.1, 1e+16, 2.0.
std::string float_text(double number);

}  // namespace thimble::jinja
