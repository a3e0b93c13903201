// Filters for texts and numbers: x | NAME.
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "templates/jinja/format.h"
#include "templates/jinja/letters.h"
#include "templates/jinja/machine.h"
#include "templates/jinja/table.h"
#include "templates/jinja/text.h"
#include "text/utf8.h"

namespace thimble::jinja {
namespace {

Status bad(const std::string& what) { return error(Code::kInvalidArgument, "%s", what.c_str()); }

// The subject as a text; an undefined one is empty.
Result<Text> subject_text(Call& c) { return printed(c.heap, c.self); }

// ---- texts ----

template <std::string_view (*first)(std::string_view, const std::string*),
          std::string_view (*second)(std::string_view, const std::string*)>
Result<Value> strip(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  const std::string* set = nullptr;
  if (c.given(0) && !is<None>(c.arguments[0])) {
    THIMBLE_LET(given, c.text(0));
    set = as_text(c.arguments[0]);
    THIMBLE_TRY(c.heap.spend_steps(text->size() * given->size() / 64));
  }
  return c.made(second(first(*text, set), set));
}

template <void (*changed)(std::string_view, TextOut&)>
Result<Value> change(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  TextOut out(c.heap);
  changed(*text, out);
  return out.value(is_markup(c.self));
}

Result<Value> title(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  TextOut out(c.heap);
  bool starts = true;
  for (std::string_view rest = *text; !rest.empty() && out.status().ok();) {
    const std::string_view letter = take_character(rest);
    if (starts)
      upper(letter, out);
    else
      lower(letter, out);
    starts = space_at_start(letter) || std::string_view("-({[<").find(letter) != std::string_view::npos;
  }
  return out.value();
}

Result<Value> replace(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  THIMBLE_LET(old, printed(c.heap, c.arguments[0]));
  THIMBLE_LET(with, printed(c.heap, c.arguments[1]));
  text.markup = false;
  std::vector<Value> given = {old, with};
  if (c.given(2) && !is<None>(c.arguments[2])) given.push_back(c.arguments[2]);
  return call_builtin(c.machine, *find_method(Value(text), "replace"), Value(text), std::move(given), {});
}

Result<Value> indent(Call& c) {
  const Text* text = as<Text>(c.self);
  if (!text) return bad(std::string(kind_name(c.self)) + " has no lines that could be indented");
  std::string spaces;
  const std::string* margin = as_text(c.arguments[0]);
  if (!margin) {
    THIMBLE_LET(width, c.integer(0, 4));
    if (width > 1000) return bad("an indent is wider than 1000");
    spaces.assign(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
    margin = &spaces;
  }
  const bool first = c.flag(1), blank = c.flag(2);
  TextOut out(c.heap);
  if (first) out += *margin;
  std::string_view rest = **text;
  for (bool ended = true, starts = true; ended && out.status().ok(); starts = false) {
    const size_t before = rest.size();
    const std::string_view line = rest.empty() ? rest : take_line(rest);
    // A line ending means that another line follows, even an empty one. Jinja2 appends \n to the text, which
    // turns a final \r into a single line ending.
    ended = before - rest.size() > line.size() && !(rest.empty() && (*text)->ends_with('\r'));
    if (!starts) out += '\n';
    if (!starts && (blank || !line.empty())) out += *margin;
    out += line;
  }
  return out.value(is_markup(c.self));
}

Result<Value> as_string(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  return Value(text);
}

// Marks the text as HTML that is not escaped.
Result<Value> safe(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  text.markup = true;
  return Value(text);
}

Result<Value> escape(Call& c) {
  THIMBLE_LET(text, escaped(c.heap, c.self));
  return Value(text);
}

Result<Value> force_escape(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  text.markup = false;
  THIMBLE_LET(made, escaped(c.heap, Value(text)));
  return Value(made);
}

// ---- numbers ----

// The digits of a number as Python reads them: without surrounding space, "1_000" as "1000". Empty if it is
// not a number.
std::string plain_digits(std::string_view text) {
  text = strip_end(strip_start(text, nullptr), nullptr);
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto is_digit = [&](size_t at) {
      // Also accept digits of other scripts here; other characters are refused when they are reached.
      return at < text.size() &&
             (std::isalnum(static_cast<unsigned char>(text[at])) || static_cast<uint8_t>(text[at]) >= 0x80);
    };
    if (static_cast<uint8_t>(text[i]) >= 0x80) {  // may be a digit of another script
      const CodePoint point = first_code_point(text.substr(i));
      const int digit = decimal_value(point.value);
      if (digit < 0) return {};
      out += static_cast<char>('0' + digit);
      i += point.size - 1;
    } else if (text[i] != '_')
      out += text[i];
    else if (i == 0 || !is_digit(i - 1) || !is_digit(i + 1))
      return {};
  }
  return out;
}

Status too_large() { return error(Code::kUnsupported, "a number becomes too large"); }

// Returns invalid_argument if the text is not an integer.
std::errc read_integer(std::string_view text, int base, int64_t& out) {
  std::string digits = plain_digits(text);
  const bool negative = digits.starts_with('-');
  if (negative || digits.starts_with('+')) digits.erase(0, 1);
  const char prefix = base == 16 ? 'x' : base == 8 ? 'o' : base == 2 ? 'b' : '\0';
  if (prefix && digits.size() > 2 && digits[0] == '0' && (digits[1] | 0x20) == prefix) digits.erase(0, 2);
  if (digits.starts_with('-')) return std::errc::invalid_argument;
  if (negative) digits.insert(0, 1, '-');
  const char* end = digits.data() + digits.size();
  const auto read = std::from_chars(digits.data(), end, out, base);
  return read.ptr == end && !digits.empty() ? read.ec : std::errc::invalid_argument;
}

bool read_real(std::string_view text, double& out) {
  std::string digits = plain_digits(text);
  if (digits.starts_with('+') && !digits.starts_with("+-")) digits.erase(0, 1);
  if (digits.find('(') != std::string::npos) return false;  // nan(...)
  const char* end = digits.data() + digits.size();
  const auto read = std::from_chars(digits.data(), end, out);
  if (read.ptr != end || digits.empty()) return false;
  if (read.ec == std::errc::result_out_of_range) out = float_beyond(digits);
  return true;
}

Result<Value> to_integer(Call& c) {
  THIMBLE_TRY(need_defined(c.self));
  const Value otherwise = c.given(0) ? c.arguments[0] : Value(int64_t{0});
  THIMBLE_LET(base, c.integer(1, 10));
  if (base < 2 || base > 36) return bad("the base of a number is 2 to 36");
  int64_t room = 0;
  if (const int64_t* integer = as_integer(c.self, room)) return Value(*integer);
  if (is<Digits>(c.self)) return c.self;
  double number = 0;
  if (const double* real = as<double>(c.self)) {
    number = *real;
  } else if (const std::string* text = as_text(c.self)) {
    THIMBLE_TRY(c.heap.spend_bytes(text->size()));
    int64_t integer = 0;
    const std::errc read = read_integer(*text, static_cast<int>(base), integer);
    if (read == std::errc()) return Value(integer);
    if (read == std::errc::result_out_of_range) return too_large();
    if (!read_real(*text, number) || !std::isfinite(number)) return otherwise;
  } else {
    return otherwise;
  }
  if (std::isnan(number)) return otherwise;
  if (!(std::abs(number) < 9.2e18)) return too_large();  // Python's integers are unbounded
  return Value(static_cast<int64_t>(number));
}

Result<Value> to_float(Call& c) {
  THIMBLE_TRY(need_defined(c.self));
  int64_t room = 0;
  if (const int64_t* integer = as_integer(c.self, room)) return Value(static_cast<double>(*integer));
  if (is<double>(c.self)) return c.self;
  if (const Digits* digits = as<Digits>(c.self)) return Value(float_beyond(*digits->text));
  const Value otherwise = c.given(0) ? c.arguments[0] : Value(0.0);
  const std::string* text = as_text(c.self);
  if (!text) return otherwise;
  THIMBLE_TRY(c.heap.spend_bytes(text->size()));
  double number = 0;
  return read_real(*text, number) ? Value(number) : otherwise;
}

Result<Value> absolute(Call& c) {
  if (const double* real = as<double>(c.self)) return Value(std::abs(*real));
  int64_t room = 0;
  const int64_t* integer = as_integer(c.self, room);
  if (!integer) return bad(std::string(kind_name(c.self)) + " has no absolute value");
  return *integer < 0 ? arithmetic(c.heap, "-", Value(int64_t{0}), c.self) : Result<Value>(*integer);
}

// round(precision, method): "common", "ceil" or "floor".
Result<Value> round(Call& c) {
  int64_t room = 0;
  const int64_t* integer = as_integer(c.self, room);
  const double* real = as<double>(c.self);
  if (!integer && !real) return bad(std::string(kind_name(c.self)) + " cannot be rounded");
  THIMBLE_LET(precision, c.integer(0, 0));
  const std::string* method = as_text(c.arguments[1]);
  const double number = real ? *real : static_cast<double>(*integer);
  if (!method || *method == "common") {
    if (real) return Value(rounded(number, precision));
    return precision >= 0 ? Value(*integer) : Value(static_cast<int64_t>(rounded(number, precision)));
  }
  if (*method != "ceil" && *method != "floor") return bad("the methods of round are common, ceil and floor");
  const double unit = std::pow(10.0, static_cast<double>(precision));
  const double whole = *method == "ceil" ? std::ceil(number * unit) : std::floor(number * unit);
  // Adding 0.0 removes the sign of a zero, as the result is an integer in Jinja2
  return Value((whole + 0.0) / unit);
}

Result<Value> center(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  const Value width = c.given(0) ? c.arguments[0] : Value(int64_t{80});
  return call_builtin(c.machine, *find_method(Value(text), "center"), Value(text), {width}, {});
}

// truncate(length, killwords, end, leeway)
Result<Value> truncate(Call& c) {
  if (!is<Text>(c.self) && !is<Undefined>(c.self))
    return bad(std::string(kind_name(c.self)) + " cannot be truncated");
  THIMBLE_LET(text, subject_text(c));
  THIMBLE_LET(length, c.integer(0, 255));
  const Value end_value = c.given(2) ? c.arguments[2] : make_text("...");
  THIMBLE_LET(end, printed(c.heap, end_value));
  THIMBLE_LET(leeway, c.integer(3, 5));
  THIMBLE_TRY(c.heap.spend_bytes(text->size()));
  const auto size = static_cast<int64_t>(character_count(*text)),
             end_size = static_cast<int64_t>(character_count(*end));
  if (length < end_size || leeway < 0) return bad("truncate needs more characters than its ending has");
  if (size - leeway <= length) return Value(text);
  std::string_view kept = characters(*text, 0, static_cast<size_t>(length - end_size));
  if (!c.flag(1)) kept = kept.substr(0, std::min(kept.rfind(' '), kept.size()));
  THIMBLE_LET(begin, c.made(kept));
  return arithmetic(c.heap, "+", begin, Value(end));
}

Result<Value> wordcount(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  THIMBLE_TRY(c.heap.spend_steps(text->size() / 16));
  return Value(static_cast<int64_t>(word_count(*text)));
}

// "%s and %s"|format(a, b)
Result<Value> format(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  if (!c.rest.empty() && !c.keywords.empty())
    return bad("format takes values by position or by name, not both");
  if (!c.keywords.empty()) {
    THIMBLE_LET(names, c.heap.dict());
    for (const auto& [key, value] : c.keywords) THIMBLE_TRY(c.heap.set(*names, key, value));
    return percent_format(c.heap, text, Value(names));
  }
  THIMBLE_LET(places, c.heap.list(List::Kind::kTuple));
  for (const Value& value : c.rest) THIMBLE_TRY(c.heap.append(*places, value));
  return percent_format(c.heap, text, Value(places));
}

Status url_quote(Call& c, const Value& value, bool in_query, TextOut& out) {
  THIMBLE_LET(text, printed(c.heap, value));
  for (const char byte : *text) {
    const bool kept =
        (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || (byte >= '0' && byte <= '9') ||
        std::string_view("_.-~").find(byte) != std::string_view::npos || (byte == '/' && !in_query);
    if (kept) {
      out += byte;
    } else if (byte == ' ' && in_query) {
      out += '+';
    } else {
      constexpr std::string_view kDigits = "0123456789ABCDEF";
      const char code[] = {'%', kDigits[static_cast<uint8_t>(byte) >> 4],
                           kDigits[static_cast<uint8_t>(byte) & 15]};
      out += std::string_view(code, sizeof code);
    }
  }
  return out.status();
}

// Encodes a text, or key-value pairs as a query string.
Result<Value> urlencode(Call& c) {
  TextOut out(c.heap);
  const auto add = [&](const Value& key, const Value& value) -> Status {
    if (!out.text().empty()) out += '&';
    THIMBLE_TRY(url_quote(c, key, true, out));
    out += '=';
    return url_quote(c, value, true, out);
  };
  if (Dict* const* dict = as<Dict*>(c.self)) {
    for (const auto& [key, value] : (*dict)->items) THIMBLE_TRY(add(key_value(key), value));
  } else if (is<List*>(c.self)) {
    THIMBLE_LET(all, elements(c.heap, c.self));
    for (const Value& item : all->items) {
      THIMBLE_LET(both, elements(c.heap, item));
      if (both->items.size() != 2) return bad("urlencode takes a text, or pairs");
      THIMBLE_TRY(add(both->items[0], both->items[1]));
    }
  } else {
    THIMBLE_TRY(url_quote(c, c.self, false, out));
  }
  return out.value();
}

// Writes a dict as attributes of an HTML tag: class="a".
Result<Value> xmlattr(Call& c) {
  Dict* const* dict = as<Dict*>(c.self);
  if (!dict) return bad(std::string("xmlattr takes a dict, and ") + kind_name(c.self) + " was given");
  TextOut out(c.heap);
  for (const auto& [key, value] : (*dict)->items) {
    if (is<None>(value) || is<Undefined>(value)) continue;
    THIMBLE_LET(name, escaped(c.heap, key_value(key)));
    THIMBLE_LET(text, escaped(c.heap, value));
    if (name->find_first_of(" \t\n\v\f\r/>=") != std::string::npos)
      return bad("xmlattr does not accept the name: " + name->substr(0, 64));
    if (!out.text().empty() || c.flag(0, true)) out += ' ';
    (((out += *name) += "=\"") += *text) += '"';
  }
  return out.value();
}

constexpr Builtin kTextFilters[] = {
    {"abs", "", absolute},
    {"capitalize", "", change<capitalized>},
    {"center", "?width", center},
    {"e", "", escape},
    {"escape", "", escape},
    {"float", "?default", to_float},
    {"forceescape", "", force_escape},
    {"format", "* **", format},
    {"indent", "?width ?first ?blank", indent},
    {"int", "?default ?base", to_integer},
    {"lower", "", change<lower>},
    {"replace", "old new ?count", replace},
    {"round", "?precision ?method", round},
    {"safe", "", safe},
    {"string", "", as_string},
    {"title", "", title},
    {"trim", "?chars", strip<strip_start, strip_end>},
    {"truncate", "?length ?killwords ?end ?leeway", truncate},
    {"upper", "", change<upper>},
    {"urlencode", "", urlencode},
    {"wordcount", "", wordcount},
    {"xmlattr", "?autospace", xmlattr},
};

}  // namespace

const Builtin* find_text_filter(std::string_view name) { return find_in(kTextFilters, name); }

}  // namespace thimble::jinja
