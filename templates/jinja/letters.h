// Unicode letters and digits as Python's str classifies them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace thimble::jinja {

class TextOut;

// Each writes the text in the named case.
void upper(std::string_view text, TextOut& out);
void lower(std::string_view text, TextOut& out);
// First letter in upper case, all others in lower case.
void capitalized(std::string_view text, TextOut& out);
// The first letter of each word in upper case, all others in lower case.
void titled(std::string_view text, TextOut& out);
void swapped(std::string_view text, TextOut& out);
// Case-folded, for comparisons that ignore case.
void folded(std::string_view text, TextOut& out);

// Whether the text has cased letters and all of them are upper case, lower case, or as titled() writes them.
bool is_upper(std::string_view text);
bool is_lower(std::string_view text);
bool is_titled(std::string_view text);

// Whether the text is not empty and consists only of such characters.
bool is_letters(std::string_view text);
bool is_letters_and_numbers(std::string_view text);
bool is_numbers(std::string_view text);   // includes fractions and Roman numerals
bool is_digits(std::string_view text);    // includes superscripts
bool is_decimals(std::string_view text);  // decimal digits only
bool is_spaces(std::string_view text);

// The value 0 to 9 of a decimal digit of any script, otherwise -1.
int decimal_value(uint32_t code);

// The number of runs of letters, digits and underscores.
size_t word_count(std::string_view text);

}  // namespace thimble::jinja
