#include "templates/jinja/format.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "templates/jinja/machine.h"
#include "templates/jinja/text.h"
#include "text/json.h"
#include "text/utf8.h"

namespace thimble::jinja {
namespace {

Status bad(const std::string& what) { return error(Code::kInvalidArgument, "%s", what.c_str()); }

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The layout of a field: "[[fill]align][sign][#][0][width][,][.precision][type]".
struct Layout {
  std::string fill = " ";
  char align = '\0';  // '<', '>', '^', or '=' (padding between sign and digits); '\0': the type decides
  char sign = '-';    // '+' and ' ' are put before numbers that are not negative
  bool alternate = false;
  int64_t width = 0, precision = -1;
  char group = '\0';
  char type = '\0';
};

// Removes a number from the start of `from` and returns it; `otherwise` if there is none.
Result<int64_t> take_count(std::string_view& from, int64_t otherwise) {
  if (from.empty() || !is_digit(from[0])) return otherwise;
  int64_t count = 0;
  const auto read = std::from_chars(from.data(), from.data() + from.size(), count);
  if (read.ec != std::errc() || count > INT32_MAX) return bad("a field of a format is too wide");
  from.remove_prefix(static_cast<size_t>(read.ptr - from.data()));
  return count;
}

// Pads sign and digits, or a text, to the layout's width.
Result<std::string> padded(Heap& heap, const Layout& layout, const std::string& sign, const std::string& body,
                           char align) {
  const size_t size = character_count(sign) + character_count(body);
  const size_t room = static_cast<size_t>(std::max<int64_t>(layout.width, 0));
  const size_t fill = room > size ? room - size : 0;
  if (layout.align) align = layout.align;
  const size_t before = align == '>' ? fill : align == '^' ? fill / 2 : 0;
  const size_t between = align == '=' ? fill : 0;
  TextOut out(heap);
  out.add(before, layout.fill);
  out += sign;
  out.add(between, layout.fill);
  out += body;
  out.add(fill - before - between, layout.fill);
  return out.take();
}

std::string sign_of(bool negative, const Layout& layout) {
  return negative ? "-" : layout.sign == '-' ? "" : std::string(1, layout.sign);
}

// Groups digits: 1234567 as 1,234,567. `digits` begins with digits and may continue with a fraction. Zeros
// that fill the width are grouped too.
Result<std::string> grouped(Heap& heap, const std::string& digits, const Layout& layout, size_t sign) {
  if (!layout.group) return digits;
  const bool in_fours = layout.type && std::string_view("boxX").find(layout.type) != std::string_view::npos;
  const size_t size = in_fours ? 4 : 3;
  const std::string_view kDigits = in_fours ? "0123456789abcdefABCDEF" : "0123456789";
  const size_t whole = std::min(digits.find_first_not_of(kDigits), digits.size());
  if (whole == 0) return digits;
  size_t count = whole;
  if (layout.fill == "0" && layout.align == '=') {
    const auto room = static_cast<size_t>(layout.width);
    THIMBLE_TRY(heap.spend_steps(room));
    while (sign + count + (count - 1) / size + digits.size() - whole < room) ++count;
  }
  TextOut out(heap);
  for (size_t i = 0; i < count; ++i) {
    if (i && (count - i) % size == 0) out += layout.group;
    out += i < count - whole ? '0' : digits[i - (count - whole)];
  }
  out += std::string_view(digits).substr(whole);
  return out.take();
}

std::string integer_digits(uint64_t number, int base) {
  char buffer[72];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, number, base).ptr};
}

uint64_t magnitude(int64_t number) {
  return number < 0 ? 0 - static_cast<uint64_t>(number) : static_cast<uint64_t>(number);
}

std::string upper_case(std::string text) {
  for (char& c : text)
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  return text;
}

// The digits of a finite, nonnegative number in the notation 'e', 'f' or 'g'. `dot`: as floats print
// themselves, always with a fraction or an exponent.
std::string real_digits(double number, char notation, int64_t precision, bool dot) {
  // Room for the digits of the largest float, its fraction and its exponent.
  std::string buffer(static_cast<size_t>(precision) + 400, '\0');
  const auto written = [&](std::chars_format format, int64_t digits) {
    const auto end =
        std::to_chars(buffer.data(), buffer.data() + buffer.size(), number, format, static_cast<int>(digits));
    return buffer.substr(0, static_cast<size_t>(end.ptr - buffer.data()));
  };
  if (notation == 'e') return written(std::chars_format::scientific, precision);
  if (notation == 'f') return written(std::chars_format::fixed, precision);
  precision = std::max<int64_t>(precision, 1);
  std::string text = written(std::chars_format::scientific, precision - 1);
  const size_t e = text.find('e');
  int exponent = 0;
  std::from_chars(text.data() + e + (text[e + 1] == '+' ? 2 : 1), text.data() + text.size(), exponent);
  const auto trim = [](std::string& digits) {
    if (digits.find('.') == std::string::npos) return;
    digits.erase(digits.find_last_not_of('0') + 1);
    if (digits.back() == '.') digits.pop_back();
  };
  if (exponent < -4 || exponent >= precision - (dot ? 1 : 0)) {
    std::string mantissa = text.substr(0, e);
    trim(mantissa);
    return mantissa + text.substr(e);
  }
  std::string fixed = written(std::chars_format::fixed, precision - 1 - exponent);
  trim(fixed);
  if (dot && fixed.find('.') == std::string::npos) fixed += ".0";
  return fixed;
}

Result<std::string> real_field(Heap& heap, double number, const Layout& layout) {
  char type = layout.type ? layout.type : 'r';
  const bool capital = type >= 'A' && type <= 'Z';
  if (capital) type = static_cast<char>(type - 'A' + 'a');
  const std::string sign = sign_of(std::signbit(number) && !std::isnan(number), layout);
  double size = std::abs(number);
  if (type == '%') size *= 100;
  std::string digits;
  const int64_t precision = layout.precision < 0 ? 6 : layout.precision;
  // Includes intermediate copies
  THIMBLE_TRY(heap.spend_bytes(4 * (static_cast<uint64_t>(precision) + 400)));
  if (!std::isfinite(size)) {
    digits = std::isnan(size) ? "nan" : "inf";
  } else if (type == 'r') {
    digits = layout.precision < 0 ? float_text(size) : real_digits(size, 'g', precision, true);
  } else {
    digits = real_digits(size, type == '%' ? 'f' : type, precision, false);
    if (layout.alternate &&
        (type == 'g' || digits.find('.') != std::string::npos || digits.find('e') != std::string::npos))
      return bad("'#' of a format is not known for floats");
    if (layout.alternate) digits += '.';
  }
  if (type == '%') digits += '%';
  if (capital) digits = upper_case(digits);
  THIMBLE_LET(body, grouped(heap, digits, layout, sign.size()));
  return padded(heap, layout, sign, body, '>');
}

Result<std::string> integer_field(Heap& heap, int64_t number, const Layout& layout) {
  const char type = layout.type ? layout.type : 'd';
  const int base = type == 'b' ? 2 : type == 'o' ? 8 : type == 'x' || type == 'X' ? 16 : 10;
  std::string sign = sign_of(number < 0, layout), digits = integer_digits(magnitude(number), base);
  if (type == 'X') digits = upper_case(digits);
  if (layout.alternate && base != 10) sign += std::string("0") + type;
  if (static_cast<int64_t>(digits.size()) < layout.precision) {
    THIMBLE_TRY(heap.spend_bytes(3 * static_cast<uint64_t>(layout.precision)));
    digits.insert(0, static_cast<size_t>(layout.precision) - digits.size(), '0');
  }
  THIMBLE_LET(body, grouped(heap, digits, layout, sign.size()));
  return padded(heap, layout, sign, body, '>');
}

Result<std::string> copy(Heap& heap, std::string_view text) {
  THIMBLE_TRY(heap.spend_bytes(text.size()));
  return std::string(text);
}

Result<std::string> text_field(Heap& heap, std::string_view text, const Layout& layout, char align) {
  if (layout.precision >= 0)
    text = characters(text, 0, std::min(static_cast<size_t>(layout.precision), character_count(text)));
  THIMBLE_LET(body, copy(heap, text));
  return padded(heap, layout, "", body, align);
}

// The character with this code point, as UTF-8.
Result<std::string> character(int64_t code) {
  if (code < 0 || code > 0x10ffff || code >> 11 == 0x1b) return bad("a number for %c is not a character");
  std::string out;
  append_utf8(out, static_cast<uint32_t>(code));
  return out;
}

// A value as Python shows it inside a list.
Result<std::string> shown(Heap& heap, const Value& value) {
  if (const std::string* text = as_text(value)) {
    TextOut out(heap);
    quote(*text, out);
    return out.take();
  }
  if (is<Undefined>(value)) return std::string("Undefined");
  THIMBLE_LET(text, printed(heap, value));
  return copy(heap, *text);
}

// ---- "%d" % x ----

class Percent {
 public:
  Percent(Heap& heap, const Text& format, const Value& values)
      : heap_(heap), rest_(*format), markup_(format.markup), values_(values), out_(heap) {
    if (List* const* list = as<List*>(values); list && (*list)->kind == List::Kind::kTuple) tuple_ = *list;
  }
  Result<Value> run();

 private:
  Status field();
  Result<Layout> layout(bool& zero);
  Result<int64_t> count(int64_t otherwise);
  Result<Value> next();
  Result<std::string> written(const Value& value, Layout& layout, bool zero);

  Heap& heap_;
  std::string_view rest_;
  const bool markup_;
  const Value values_;
  const List* tuple_ = nullptr;
  size_t used_ = 0;
  TextOut out_;
};

Result<Value> Percent::run() {
  while (!rest_.empty()) {
    const size_t at = std::min(rest_.find('%'), rest_.size());
    THIMBLE_TRY(heap_.spend_steps(1));
    out_ += rest_.substr(0, at);
    THIMBLE_TRY(out_.status());
    rest_.remove_prefix(at);
    if (!rest_.empty()) THIMBLE_TRY(field());
  }
  const bool can_be_named = is<Dict*>(values_) || is<Undefined>(values_) || (is<List*>(values_) && !tuple_);
  if (!can_be_named && used_ < (tuple_ ? tuple_->items.size() : 1))
    return bad("a format with % has fewer fields than values");
  return out_.value(markup_);
}

Result<Value> Percent::next() {
  const size_t there = tuple_ ? tuple_->items.size() : 1;
  if (used_ >= there) return bad("a format with % has more fields than values");
  ++used_;
  return tuple_ ? tuple_->items[used_ - 1] : values_;
}

// Reads digits, or * for the next value.
Result<int64_t> Percent::count(int64_t otherwise) {
  if (!rest_.starts_with('*')) return take_count(rest_, otherwise);
  rest_.remove_prefix(1);
  THIMBLE_LET(value, next());
  const int64_t* integer = as<int64_t>(value);
  if (!integer || *integer > INT32_MAX || *integer < -INT32_MAX) return bad("* of a format needs an integer");
  return *integer;
}

Result<Layout> Percent::layout(bool& zero) {
  Layout layout;
  layout.align = '>';
  for (; !rest_.empty() && std::string_view("#0- +").find(rest_[0]) != std::string_view::npos;
       rest_.remove_prefix(1)) {
    if (rest_[0] == '#') layout.alternate = true;
    if (rest_[0] == '0') zero = true;
    if (rest_[0] == '-') layout.align = '<';
    if (rest_[0] == '+' || (rest_[0] == ' ' && layout.sign == '-')) layout.sign = rest_[0];
  }
  THIMBLE_LET(width, count(0));
  if (width < 0) layout.align = '<';
  layout.width = std::abs(width);
  if (rest_.starts_with('.')) {
    rest_.remove_prefix(1);
    THIMBLE_LET(precision, count(0));
    layout.precision = std::max<int64_t>(precision, 0);
  }
  if (!rest_.empty() && std::string_view("hlL").find(rest_[0]) != std::string_view::npos)
    rest_.remove_prefix(1);
  return layout;
}

Status Percent::field() {
  rest_.remove_prefix(1);
  Value named;
  const bool by_name = rest_.starts_with('(');
  if (by_name) {
    const size_t end = rest_.find(')');
    if (end == std::string_view::npos) return bad("a name in a format with % has no end");
    Dict* const* dict = as<Dict*>(values_);
    const Value* found = dict ? (*dict)->find(rest_.substr(1, end - 1)) : nullptr;
    if (!found)
      return bad("a format with % has no value named '" +
                 std::string(rest_.substr(1, std::min<size_t>(end - 1, 64))) + "'");
    named = *found;
    rest_.remove_prefix(end + 1);
  }
  bool zero = false;
  THIMBLE_LET(how, layout(zero));
  if (rest_.empty()) return bad("a format with % ends within a field");
  how.type = rest_[0];
  rest_.remove_prefix(1);
  if (how.type == '%') {
    out_ += '%';
    return {};
  }
  Value value = named;
  if (!by_name) {
    THIMBLE_LET(taken, next());
    value = taken;
  }
  THIMBLE_LET(text, written(value, how, zero));
  out_ += text;
  return {};
}

Result<std::string> Percent::written(const Value& value, Layout& how, bool zero) {
  if (how.type == 's' || how.type == 'r' || how.type == 'a') {
    if (how.type != 's') {
      THIMBLE_LET(text, shown(heap_, value));
      if (!markup_) return text_field(heap_, text, how, '>');
      TextOut written(heap_);
      escape(text, written);
      THIMBLE_LET(safe, written.take());
      return text_field(heap_, safe, how, '>');
    }
    THIMBLE_LET(text, markup_ ? escaped(heap_, value) : printed(heap_, value));
    return text_field(heap_, *text, how, '>');
  }
  int64_t room = 0;
  const int64_t* integer = as_integer(value, room);
  const double* real = as<double>(value);
  if (how.type == 'c') {
    if (const std::string* text = as_text(value); text && character_count(*text) == 1)
      return text_field(heap_, *text, how, '>');
    if (!integer) return bad("%c needs a character or its number");
    THIMBLE_LET(text, character(*integer));
    return text_field(heap_, text, how, '>');
  }
  const bool for_integers = std::string_view("diuxXo").find(how.type) != std::string_view::npos;
  if (!for_integers && std::string_view("eEfFgG").find(how.type) == std::string_view::npos)
    return bad(std::string("a format with % does not know %") + how.type);
  if (!integer && !real)
    return bad(std::string("%") + how.type + " needs a number, and " + kind_name(value) + " was given");
  if (zero && how.align != '<') {
    how.fill = "0";
    how.align = '=';
  }
  if (!for_integers) return real_field(heap_, real ? *real : static_cast<double>(*integer), how);
  if (how.type == 'i' || how.type == 'u') how.type = 'd';
  if (real) {
    if (how.type != 'd' || !(std::abs(*real) < 9e18))
      return bad(std::string("%") + how.type + " needs an integer");
    return integer_field(heap_, static_cast<int64_t>(*real), how);
  }
  return integer_field(heap_, *integer, how);
}

// ---- "{:>5}".format(x) ----

Result<Layout> read_layout(std::string_view spec) {
  Layout layout;
  const auto is_align = [](std::string_view c) {
    return c.size() == 1 && std::string_view("<>^=").find(c[0]) != std::string_view::npos;
  };
  const size_t first = spec.empty() ? 0 : first_code_point(spec).size;
  if (is_align(spec.substr(first, 1))) {
    layout.fill = spec.substr(0, first);
    layout.align = spec[first];
    spec.remove_prefix(first + 1);
  } else if (is_align(spec.substr(0, 1))) {
    layout.align = spec[0];
    spec.remove_prefix(1);
  }
  const auto take = [&](std::string_view any) {
    if (spec.empty() || any.find(spec[0]) == std::string_view::npos) return '\0';
    const char c = spec[0];
    spec.remove_prefix(1);
    return c;
  };
  if (const char sign = take("+- ")) layout.sign = sign;
  layout.alternate = take("#");
  if (take("0") && !layout.align) {
    layout.fill = "0";
    layout.align = '0';  // as '=' for numbers, as '<' for texts
  }
  THIMBLE_LET(width, take_count(spec, 0));
  layout.width = width;
  layout.group = take(",_");
  if (take(".")) {
    THIMBLE_LET(precision, take_count(spec, -1));
    if (precision < 0) return bad("a field's precision is missing");
    layout.precision = precision;
  }
  layout.type = take("bcdeEfFgGosxX%");
  if (!spec.empty())
    return bad("the layout of a field is not known: '" + std::string(spec.substr(0, 64)) + "'");
  return layout;
}

Result<std::string> laid_out(Heap& heap, const Value& value, std::string_view spec) {
  if (spec.empty()) {
    THIMBLE_LET(text, printed(heap, value));
    return copy(heap, *text);
  }
  THIMBLE_LET(layout, read_layout(spec));
  const std::string* text = as_text(value);
  const bool zero = layout.align == '0';
  if (zero) layout.align = text ? '<' : '=';
  if (text) {
    if ((layout.type && layout.type != 's') || layout.group || layout.sign != '-' || layout.alternate ||
        layout.align == '=')
      return bad("the layout of a field is not one of texts: '" + std::string(spec.substr(0, 64)) + "'");
    return text_field(heap, *text, layout, '<');
  }
  int64_t room = 0;
  const int64_t* integer = as_integer(value, room);
  const double* real = as<double>(value);
  if (!integer && !real) return bad(std::string(kind_name(value)) + " has no layout");
  const bool for_reals =
      layout.type && std::string_view("eEfFgG%").find(layout.type) != std::string_view::npos;
  if (real || for_reals) {
    if (layout.type && !for_reals)
      return bad("the layout of a field is not one of floats: '" + std::string(spec.substr(0, 64)) + "'");
    return real_field(heap, real ? *real : static_cast<double>(*integer), layout);
  }
  if (layout.precision >= 0 || layout.type == 's' || (layout.type == 'c' && layout.group))
    return bad("the layout of a field is not one of integers: '" + std::string(spec.substr(0, 64)) + "'");
  if (layout.type != 'c') return integer_field(heap, *integer, layout);
  THIMBLE_LET(one, character(*integer));
  return text_field(heap, one, layout, '<');
}

class Braces {
 public:
  explicit Braces(Call& call) : c_(call) {}
  Result<std::string> run(std::string_view format, uint32_t depth);

 private:
  Result<std::string> field(std::string_view inside, uint32_t depth);
  Result<Value> find(std::string_view name);
  Result<Value> part(const Value& of, std::string_view& rest);

  Call& c_;
  size_t next_ = 0;
  bool counts_ = false, numbered_ = false;
};

// Length of the contents of the braces that `text` begins with, or npos.
size_t inside_braces(std::string_view text) {
  int open = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    open += text[i] == '{' ? 1 : text[i] == '}' ? -1 : 0;
    if (open == 0) return i - 1;
  }
  return std::string_view::npos;
}

Result<std::string> Braces::run(std::string_view rest, uint32_t depth) {
  TextOut out(c_.heap);
  while (!rest.empty()) {
    const size_t at = std::min(rest.find_first_of("{}"), rest.size());
    THIMBLE_TRY(c_.heap.spend_steps(1));
    out += rest.substr(0, at);
    THIMBLE_TRY(out.status());
    rest.remove_prefix(at);
    if (rest.empty()) break;
    if (rest.substr(0, 2) == "{{" || rest.substr(0, 2) == "}}") {
      out += rest[0];
      rest.remove_prefix(2);
      continue;
    }
    if (depth > 2) return bad("the fields of a format are nested too deeply");
    const size_t size = rest[0] == '{' ? inside_braces(rest) : std::string_view::npos;
    if (size == std::string_view::npos) return bad("a brace of a format is not closed");
    THIMBLE_LET(text, field(rest.substr(1, size), depth));
    out += text;
    rest.remove_prefix(size + 2);
  }
  return out.take();
}

// Formats name!conversion:layout. The layout may contain fields itself.
Result<std::string> Braces::field(std::string_view inside, uint32_t depth) {
  const size_t colon = std::min(inside.find(':'), inside.size());
  const std::string_view spec = inside.substr(std::min(colon + 1, inside.size()));
  std::string_view name = inside.substr(0, colon);
  char conversion = '\0';
  if (const size_t mark = name.find('!'); mark != std::string_view::npos) {
    if (mark + 2 != name.size()) return bad("a field's conversion is one letter");
    conversion = name.back();
    name = name.substr(0, mark);
  }
  THIMBLE_LET(found, find(name));
  Value value = found;
  if (conversion == 'r' || conversion == 'a') {
    THIMBLE_LET(text, shown(c_.heap, value));
    THIMBLE_LET(kept, c_.heap.keep(std::move(text)));
    value = kept;
  } else if (conversion == 's') {
    THIMBLE_LET(text, printed(c_.heap, value));
    value = text;
  } else if (conversion) {
    return bad("a field's conversion is r, s or a");
  }
  THIMBLE_LET(layout, run(spec, depth + 1));
  THIMBLE_LET(text, laid_out(c_.heap, value, layout));
  if (!is_markup(c_.self) || is_markup(value)) return std::move(text);
  TextOut out(c_.heap);
  escape(text, out);
  return out.take();
}

// Evaluates "", "0" or "name", followed by ".attribute" and "[key]".
Result<Value> Braces::find(std::string_view name) {
  const size_t end = std::min(name.find_first_of(".["), name.size());
  const std::string_view first = name.substr(0, end);
  std::string_view rest = name.substr(end);
  const bool digits = std::all_of(first.begin(), first.end(), is_digit);
  Value value;
  if (digits) {
    (first.empty() ? counts_ : numbered_) = true;
    if (counts_ && numbered_) return bad("either all fields of a format are numbered or none");
    std::string_view number = first;
    THIMBLE_LET(index, take_count(number, static_cast<int64_t>(next_)));
    next_ += first.empty();
    if (static_cast<size_t>(index) >= c_.rest.size()) return bad("format has fewer arguments than fields");
    value = c_.rest[static_cast<size_t>(index)];
  } else {
    const auto found = std::find_if(c_.keywords.begin(), c_.keywords.end(),
                                    [&](const auto& k) { return *k.first == first; });
    if (found == c_.keywords.end())
      return bad("format does not know the field '" + std::string(first.substr(0, 64)) + "'");
    value = found->second;
  }
  while (!rest.empty()) {
    THIMBLE_LET(inner, part(value, rest));
    value = inner;
  }
  return value;
}

Result<Value> Braces::part(const Value& of, std::string_view& rest) {
  if (rest[0] == '.') {
    const size_t end = std::min(rest.find_first_of(".[", 1), rest.size());
    const std::string name(rest.substr(1, end - 1));
    rest.remove_prefix(end);
    return c_.machine.item(of, make_text(name));
  }
  const size_t end = rest.find(']');
  if (rest[0] != '[' || end == std::string_view::npos) return bad("a field's name is not known");
  std::string_view key = rest.substr(1, end - 1);
  const std::string_view text = key;
  rest.remove_prefix(end + 1);
  THIMBLE_LET(index, take_count(key, -1));
  return c_.machine.item(of, key.empty() && index >= 0 ? Value(index) : make_text(text));
}

}  // namespace

Result<Value> percent_format(Heap& heap, const Text& format, const Value& values) {
  return Percent(heap, format, values).run();
}

Result<Value> brace_format(Call& call, const Text& format) {
  THIMBLE_LET(text, Braces(call).run(*format, 1));
  return call.heap.keep(std::move(text), is_markup(call.self));
}

double rounded(double number, int64_t digits) {
  if (!std::isfinite(number) || digits > 330) return number;
  if (digits < -330) return number * 0;
  if (digits < 0) {
    const double unit = std::pow(10.0, static_cast<double>(-digits));
    return std::nearbyint(number / unit) * unit;
  }
  // Parse the exact digits again.
  const std::string text = real_digits(std::abs(number), 'f', digits, false);
  double read = 0;
  std::from_chars(text.data(), text.data() + text.size(), read);
  return std::copysign(read, number);
}

}  // namespace thimble::jinja
