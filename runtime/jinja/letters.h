// Letters and digits of Unicode as Python's str knows them.
#pragma once

#include <string>
#include <string_view>

namespace thimble::jinja {

std::string upper(std::string_view text);
std::string lower(std::string_view text);
// The first letter large, the others small.
std::string capitalized(std::string_view text);
// Every word so.
std::string titled(std::string_view text);
std::string swapped(std::string_view text);
// For comparisons without regard to case.
std::string folded(std::string_view text);

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

// Runs of letters, numbers and underscores.
size_t word_count(std::string_view text);

}  // namespace thimble::jinja
