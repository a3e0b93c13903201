#include "templates/jinja/letters.h"

#include <algorithm>
#include <iterator>

#include "templates/jinja/case_table.h"
#include "templates/jinja/text.h"
#include "templates/jinja/value.h"
#include "text/expression.h"
#include "text/json.h"
#include "text/utf8.h"

namespace thimble::jinja {
namespace {

// The range of a table that contains a code point, or null.
template <typename Range, size_t n>
const Range* find_range(const Range (&table)[n], uint32_t code) {
  const auto after = std::upper_bound(std::begin(table), std::end(table), code,
                                      [](uint32_t c, const Range& range) { return c < range.first; });
  if (after == std::begin(table) || code > std::prev(after)->last) return nullptr;
  return std::prev(after);
}

template <size_t n>
uint32_t counterpart(const CaseRange (&table)[n], uint32_t code) {
  const CaseRange* range = find_range(table, code);
  if (!range || (code - range->first) % range->step) return code;
  return static_cast<uint32_t>(static_cast<int32_t>(code) + range->delta);
}

uint32_t upper_code(uint32_t code) {
  if (code < 0x80) return code >= 'a' && code <= 'z' ? code - 'a' + 'A' : code;
  return counterpart(kUpper, code);
}
uint32_t lower_code(uint32_t code) {
  if (code < 0x80) return code >= 'A' && code <= 'Z' ? code - 'A' + 'a' : code;
  return counterpart(kLower, code);
}

const WideCase* wide_case(uint32_t code) {
  const auto found = std::lower_bound(std::begin(kWide), std::end(kWide), code,
                                      [](const WideCase& w, uint32_t c) { return w.letter < c; });
  return found != std::end(kWide) && found->letter == code ? found : nullptr;
}

uint32_t title_code(uint32_t code) {
  const uint32_t own = code < 0x80 ? code : counterpart(kTitle, code);
  return own != code ? own : upper_code(code);
}
bool is_title_letter(uint32_t code) { return upper_code(code) != code && lower_code(code) != code; }
constexpr uint32_t kDottedI = 0x130;  // its lower case is two characters

bool is_large(uint32_t code) {
  return code == kDottedI || (lower_code(code) != code && upper_code(code) == code);
}
bool is_small(uint32_t code) {
  return (upper_code(code) != code || wide_case(code)) && lower_code(code) == code;
}
bool is_cased(uint32_t code) { return lower_code(code) != code || is_small(code); }

// A letter and its place in a text.
struct Letter {
  uint32_t code;
  std::string_view bytes, before, after;
};

template <typename Each>
void each_letter(std::string_view text, Each each) {
  for (size_t at = 0; at < text.size();) {
    const CodePoint point = first_code_point(text.substr(at));
    each(Letter{point.value, text.substr(at, point.size), text.substr(0, at), text.substr(at + point.size)});
    at += point.size;
  }
}

void add(TextOut& out, uint32_t code, const Letter& letter) {
  if (code == letter.code) return out.add(letter.bytes);
  std::string text;
  append_utf8(text, code);
  out += text;
}

void add_upper(TextOut& out, const Letter& letter) {
  const WideCase* wide = letter.code < 0x80 ? nullptr : wide_case(letter.code);
  if (wide)
    out += wide->upper;
  else
    add(out, upper_code(letter.code), letter);
}

void add_title(TextOut& out, const Letter& letter) {
  const WideCase* wide = letter.code < 0x80 ? nullptr : wide_case(letter.code);
  if (wide)
    out += wide->title;
  else
    add(out, title_code(letter.code), letter);
}

void add_lower(TextOut& out, const Letter& letter) {
  constexpr uint32_t kSigma = 0x3a3, kFinalSigma = 0x3c2;
  if (letter.code == kDottedI) {
    out += "i\xcc\x87";
  } else if (letter.code == kSigma) {
    const std::string_view before = last_character(letter.before);
    const bool follows = !before.empty() && is_cased(first_code_point(before).value);
    const bool ends = letter.after.empty() || !is_cased(first_code_point(letter.after).value);
    add(out, follows && ends ? kFinalSigma : lower_code(letter.code), letter);
  } else {
    add(out, lower_code(letter.code), letter);
  }
}

bool is_letter(uint32_t code) {
  const CharClass is = char_class(code);
  return is >= CharClass::kUpper && is <= CharClass::kLetter;
}
bool is_number(uint32_t code) { return char_class(code) == CharClass::kNumber; }

bool is_digit(uint32_t code) {
  return code < 0x80 ? code >= '0' && code <= '9' : find_range(kDigits, code) != nullptr;
}
bool is_decimal(uint32_t code) {
  return code < 0x80 ? code >= '0' && code <= '9' : find_range(kDecimals, code) != nullptr;
}

template <typename Holds>
bool all_codes(std::string_view text, Holds holds) {
  bool all = !text.empty();
  each_letter(text, [&](const Letter& letter) { all = all && holds(letter.code); });
  return all;
}

}  // namespace

void upper(std::string_view text, TextOut& out) {
  out.reserve(text.size());
  each_letter(text, [&](const Letter& letter) { add_upper(out, letter); });
}

void lower(std::string_view text, TextOut& out) {
  out.reserve(text.size());
  each_letter(text, [&](const Letter& letter) { add_lower(out, letter); });
}

void capitalized(std::string_view text, TextOut& out) {
  out.reserve(text.size());
  each_letter(text, [&](const Letter& letter) {
    if (letter.before.empty())
      add_title(out, letter);
    else
      add_lower(out, letter);
  });
}

void titled(std::string_view text, TextOut& out) {
  out.reserve(text.size());
  bool in_word = false;
  each_letter(text, [&](const Letter& letter) {
    if (in_word)
      add_lower(out, letter);
    else
      add_title(out, letter);
    in_word = is_cased(letter.code);
  });
}

void swapped(std::string_view text, TextOut& out) {
  out.reserve(text.size());
  each_letter(text, [&](const Letter& letter) {
    if (is_large(letter.code))
      add_lower(out, letter);
    else if (is_small(letter.code))
      add_upper(out, letter);
    else
      out += letter.bytes;
  });
}

void folded(std::string_view text, TextOut& out) {
  // Fold by way of upper case, which unifies letters with several lower-case forms; sigma has two.
  TextOut large = out.another();
  upper(text, large);
  each_letter(large.text(), [&](const Letter& letter) {
    if (letter.code == kDottedI)
      add_lower(out, letter);
    else
      add(out, lower_code(letter.code), letter);
  });
  out.fail(large.status());
}

bool is_upper(std::string_view text) {
  bool any = false, all = true;
  each_letter(text, [&](const Letter& letter) {
    any = any || is_large(letter.code);
    all = all && !is_small(letter.code) && !is_title_letter(letter.code);
  });
  return any && all;
}

bool is_lower(std::string_view text) {
  bool any = false, all = true;
  each_letter(text, [&](const Letter& letter) {
    any = any || is_small(letter.code);
    all = all && lower_code(letter.code) == letter.code;
  });
  return any && all;
}

bool is_titled(std::string_view text) {
  bool any = false, all = true, in_word = false;
  each_letter(text, [&](const Letter& letter) {
    const bool begins = is_large(letter.code) || is_title_letter(letter.code),
               goes_on = is_small(letter.code);
    all = all && !(begins && in_word) && !(goes_on && !in_word);
    in_word = begins || goes_on;
    any = any || in_word;
  });
  return any && all;
}

bool is_letters(std::string_view text) { return all_codes(text, is_letter); }
bool is_letters_and_numbers(std::string_view text) {
  return all_codes(text, [](uint32_t code) { return is_letter(code) || is_number(code); });
}
bool is_numbers(std::string_view text) { return all_codes(text, is_number); }
bool is_digits(std::string_view text) { return all_codes(text, is_digit); }
bool is_decimals(std::string_view text) { return all_codes(text, is_decimal); }
bool is_spaces(std::string_view text) { return !text.empty() && strip_start(text, nullptr).empty(); }

int decimal_value(uint32_t code) {
  if (!is_decimal(code)) return -1;
  if (code < 0x80) return static_cast<int>(code - '0');
  // Decimal digits come in tens, one after the other; some ranges contain several tens.
  return static_cast<int>((code - find_range(kDecimals, code)->first) % 10);
}

size_t word_count(std::string_view text) {
  size_t count = 0;
  bool in_word = false;
  each_letter(text, [&](const Letter& letter) {
    const bool part = is_letter(letter.code) || is_number(letter.code) || letter.code == '_';
    count += part && !in_word;
    in_word = part;
  });
  return count;
}

}  // namespace thimble::jinja
