// Texts as Python's str has them: counted in characters, though stored as UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace thimble::jinja {

class TextOut;

// Characters; a byte that begins none counts as one.
size_t character_count(std::string_view text);
// The characters from `first` up to `last`, both at most character_count().
std::string_view characters(std::string_view text, size_t first, size_t last);
// The first character of `rest`, which is not empty, taken from it.
std::string_view take_character(std::string_view& rest);
std::string_view last_character(std::string_view text);

// Bytes of the white space that `text` begins with, or ends with; 0 where it is none.
size_t space_at_start(std::string_view text);
size_t space_at_end(std::string_view text);
// Without what stands at its ends: characters of `set`, or white space where `set` is null.
std::string_view strip_start(std::string_view text, const std::string* set);
std::string_view strip_end(std::string_view text, const std::string* set);

// The first line of `rest`, which is not empty, taken from it with its end; of it, only the line is given.
std::string_view take_line(std::string_view& rest);
// For HTML: &lt; for <.
void escape(std::string_view text, TextOut& out);
// 'it': the text in quotes as Python writes it in a list.
void quote(std::string_view text, TextOut& out);
// What a number is that from_chars() found out of range: an infinity, or 0.
double float_beyond(std::string_view digits);
// 0.1, 1e+16, 2.0: the shortest digits that read back as the same number, laid out as Python does.
std::string float_text(double number);

}  // namespace thimble::jinja
