// Letters and digits of Unicode as Python's str knows them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace thimble::jinja {

class TextOut;

// Each writes the text with other letters.
void upper(std::string_view text, TextOut& out);
void lower(std::string_view text, TextOut& out);
// The first letter large, the others small.
void capitalized(std::string_view text, TextOut& out);
// Every word so.
void titled(std::string_view text, TextOut& out);
void swapped(std::string_view text, TextOut& out);
// For comparisons without regard to case.
void folded(std::string_view text, TextOut& out);

// Whether there is a letter with a case, and all of them are large, or small; or as titled() writes them.
bool is_upper(std::string_view text);
bool is_lower(std::string_view text);
bool is_titled(std::string_view text);

// Whether the text is not empty, and made of these alone.
bool is_letters(std::string_view text);
bool is_letters_and_numbers(std::string_view text);
bool is_numbers(std::string_view text);   // fractions and roman ones, too
bool is_digits(std::string_view text);    // superscripts, too
bool is_decimals(std::string_view text);  // of which numbers are written
bool is_spaces(std::string_view text);

// 0 to 9 for a digit of which numbers are written, in any script; else -1.
int decimal_value(uint32_t code);

// Runs of letters, numbers and underscores.
size_t word_count(std::string_view text);

}  // namespace thimble::jinja
