// Expressions for JSON texts: strings, numbers, any value, and the white space between them.
#pragma once

#include <optional>
#include <string>

#include "text/grammar/json_value.h"
#include "text/grammar/languages.h"
#include "text/grammar/syntax.h"

namespace thimble::grammar {

// Bounds of a number. Without `value` there is none; `open` excludes the value itself.
struct Bound {
  std::optional<Decimal> value;
  bool open = false;
};

// Makes expressions of one syntax.
//
// White space: after { [ , and : and before } and ] there may be one space or one line feed, or nothing.
class JsonText {
 public:
  explicit JsonText(Syntax& syntax, const std::optional<JsonStrings>& strings = {})
      : syntax_(syntax), strings_(strings) {}

  Expr space();
  Expr comma();  // with the space after it
  Expr colon();
  // A value exactly, except for white space and the order in which an object has its members.
  Expr exactly(const JsonValue& value);
  // The name of a member.
  Expr name(std::string_view name);
  // Any value, object, array, string or number, by rules that are made once.
  Expr any();
  Expr any_object();
  Expr any_array();
  Expr any_string();
  // A string of `min` to `max` code points.
  Expr any_string(uint32_t min, uint32_t max);
  // The string's content between quotes.
  Expr quoted(Expr content) {
    const Expr quote = strings_ ? strings_->quote : text("\"");
    return syntax_.sequence({quote, content, quote});
  }
  // One code point of a set inside of a string. Characters that need an escape have their shortest one.
  // Strings without escapes have no "<" here, because the mark that ends them begins with it.
  Expr written(const CodeSet& set);
  // Any string but these.
  Expr string_except(std::vector<std::string> names);
  Expr array(Expr item, uint32_t min, uint32_t max);

  Expr any_number();
  Expr any_integer();
  Expr number_between(const Bound& low, const Bound& high);
  Expr integer_between(std::optional<int64_t> low, std::optional<int64_t> high);
  // Integers that `divisor` divides, which is from 1 to 10000.
  Expr multiple_of(uint32_t divisor);
  // Numbers with at most so many digits after the point.
  Expr with_decimals(uint32_t digits);

 private:
  struct Fraction;

  Expr text(std::string_view bytes) { return syntax_.literal(bytes); }
  Expr exact_string(std::string_view content);
  Expr digit(char first, char last);
  Expr digits(uint32_t min, uint32_t max) { return syntax_.repeat(digit('0', '9'), min, max); }
  Expr any_fraction();
  Expr whole_between(uint64_t low, std::optional<uint64_t> high);
  Expr same_length(std::string_view low, std::string_view high);
  Expr fraction_between(const Fraction& f, size_t at, bool low, bool high, bool may_end);
  // Numbers without a sign.
  void size_between(const Bound& low, const Bound& high, const std::string& sign, std::vector<Expr>& out);
  Expr except_below(const std::vector<std::string>& names, size_t first, size_t last, size_t depth);
  Expr make_any();
  Expr make_character();

  Syntax& syntax_;
  const std::optional<JsonStrings> strings_;
  std::optional<uint32_t> any_, string_;  // rules
  std::optional<Expr> character_;
};

}  // namespace thimble::grammar
