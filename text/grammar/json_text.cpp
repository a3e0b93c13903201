#include "text/grammar/json_text.h"

#include <algorithm>

#include "text/json.h"
#include "text/utf8.h"

namespace thimble::grammar {
namespace {

// Characters of strings that need no escape.
const CodeSet kUnescaped = {{0x20, 0x21}, {0x23, 0x5B}, {0x5D, kLastCode}};

// Digits of a number before the point, and after it, at most. Small models may not find the end of a number
// by themselves.
constexpr uint32_t kMostDigits = 18;

// A byte of a string with its shortest escape, if it needs one.
std::string escaped(char byte) {
  constexpr std::string_view kShort = "\"\\\b\f\n\r\t", kLetters = "\"\\bfnrt";
  const size_t known = kShort.find(byte);
  if (known != std::string_view::npos) return {'\\', kLetters[known]};
  const std::string quoted = json_quoted(std::string(1, byte));
  return static_cast<uint8_t>(byte) < 0x20 ? quoted.substr(1, quoted.size() - 2) : std::string(1, byte);
}

std::string quoted_text(std::string_view content) {
  std::string out = "\"";
  for (const char byte : content) out += escaped(byte);
  return out + "\"";
}

}  // namespace

Expr JsonText::space() { return syntax_.optional(syntax_.set({{' ', ' '}, {'\n', '\n'}})); }
Expr JsonText::comma() { return syntax_.sequence({text(","), space()}); }
Expr JsonText::colon() { return syntax_.sequence({text(":"), space()}); }

Expr JsonText::exact_string(std::string_view content) {
  return strings_ ? quoted(text(content)) : text(quoted_text(content));
}

Expr JsonText::name(std::string_view name) {
  const bool bare = strings_ && !name.empty() && name.find_first_of(" \t\r\n\"'<>:,{}[]") == name.npos;
  return bare ? text(name) : exact_string(name);
}

Expr JsonText::exactly(const JsonValue& value) {
  using Kind = JsonValue::Kind;
  switch (value.kind) {
    case Kind::kNull:
      return text("null");
    case Kind::kBool:
      return text(value.truth ? "true" : "false");
    case Kind::kNumber:
      return text(value.text);
    case Kind::kString:
      return exact_string(value.text);
    case Kind::kArray:
    case Kind::kObject:
      break;
  }
  const bool array = value.is(Kind::kArray);
  std::vector<Expr> parts = {text(array ? "[" : "{"), space()};
  bool first = true;
  const auto next = [&] {
    if (!first) parts.push_back(comma());
    first = false;
  };
  for (const JsonValue& item : value.items) {
    next();
    parts.push_back(exactly(item));
  }
  for (const auto& [key, member] : value.members) {
    next();
    parts.push_back(name(key));
    parts.push_back(colon());
    parts.push_back(exactly(member));
  }
  if (!first) parts.push_back(space());
  parts.push_back(text(array ? "]" : "}"));
  return syntax_.sequence(std::move(parts));
}

// ---- strings ----

Expr JsonText::make_character() {
  if (strings_) return written({{0, kLastCode}});
  const auto hex = [this](uint32_t n) {
    return syntax_.repeat(syntax_.set({{'0', '9'}, {'A', 'F'}, {'a', 'f'}}), n, n);
  };
  const Expr surrogate = syntax_.set({{'D', 'D'}, {'d', 'd'}});
  const Expr unit = syntax_.choice(
      {syntax_.sequence({syntax_.set({{'0', '9'}, {'A', 'C'}, {'E', 'F'}, {'a', 'c'}, {'e', 'f'}}), hex(3)}),
       syntax_.sequence({surrogate, syntax_.set({{'0', '7'}}), hex(2)}),
       syntax_.sequence({surrogate, syntax_.set({{'8', '9'}, {'A', 'B'}, {'a', 'b'}}), hex(2), text("\\u"),
                         surrogate, syntax_.set({{'C', 'F'}, {'c', 'f'}}), hex(2)})});
  return syntax_.choice(
      {syntax_.set(kUnescaped),
       syntax_.sequence({text("\\"), syntax_.choice({syntax_.set({{'"', '"'},
                                                                  {'/', '/'},
                                                                  {'\\', '\\'},
                                                                  {'b', 'b'},
                                                                  {'f', 'f'},
                                                                  {'n', 'n'},
                                                                  {'r', 'r'},
                                                                  {'t', 't'}}),
                                                     syntax_.sequence({text("u"), unit})})})});
}

Expr JsonText::any_string(uint32_t min, uint32_t max) {
  if (!character_) character_ = make_character();
  return quoted(syntax_.repeat(*character_, min, max));
}

Expr JsonText::any_string() {
  if (!string_) {
    string_ = syntax_.add_rule("a JSON string");
    syntax_.define(*string_, strings_ ? quoted(strings_->text) : any_string(0, kUnbounded));
  }
  return syntax_.rule(*string_);
}

Expr JsonText::written(const CodeSet& set) {
  if (strings_) return syntax_.set(intersection(set, complement({{'<', '<'}})));
  std::vector<Expr> ways;
  if (CodeSet plain = intersection(set, kUnescaped); !plain.empty())
    ways.push_back(syntax_.set(std::move(plain)));
  for (const CodeRange& r : intersection(set, complement(kUnescaped)))
    for (uint32_t code = r.first; code <= r.last; ++code)
      ways.push_back(text(escaped(static_cast<char>(code))));
  return syntax_.choice(std::move(ways));
}

// Names [first, last) share `depth` bytes, and are sorted.
Expr JsonText::except_below(const std::vector<std::string>& names, size_t first, size_t last, size_t depth) {
  const Expr any_rest = syntax_.repeat(written({{0, kLastCode}}), 0, kUnbounded);
  std::vector<Expr> ways;
  bool ends = false;
  CodeSet used;
  for (size_t i = first; i < last;) {
    if (names[i].size() == depth) {
      ends = true;
      ++i;
      continue;
    }
    const CodePoint c = first_code_point(std::string_view(names[i]).substr(depth));
    size_t next = i;
    while (next < last && std::string_view(names[next])
                              .substr(depth)
                              .starts_with(std::string_view(names[i]).substr(depth, c.size)))
      ++next;
    used.push_back({c.value, c.value});
    ways.push_back(
        syntax_.sequence({written({{c.value, c.value}}), except_below(names, i, next, depth + c.size)}));
    i = next;
  }
  ways.push_back(syntax_.sequence({written(complement(used)), any_rest}));
  if (!ends) ways.push_back(syntax_.empty());
  return syntax_.choice(std::move(ways));
}

Expr JsonText::string_except(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return quoted(except_below(names, 0, names.size(), 0));
}

// ---- arrays, objects, any value ----

Expr JsonText::array(Expr item, uint32_t min, uint32_t max) {
  const Expr none = syntax_.sequence({text("["), space(), text("]")});
  if (max == 0) return none;
  const Expr others = syntax_.repeat(syntax_.sequence({comma(), item}), min > 0 ? min - 1 : 0,
                                     max == kUnbounded ? kUnbounded : max - 1);
  const Expr some = syntax_.sequence({text("["), space(), item, others, space(), text("]")});
  return min > 0 ? some : syntax_.choice({none, some});
}

Expr JsonText::any_array() { return array(any(), 0, kUnbounded); }

Expr JsonText::any_object() {
  const Expr bare = syntax_.repeat(syntax_.set({{'a', 'z'}, {'A', 'Z'}, {'0', '9'}, {'_', '_'}, {'-', '-'}}),
                                   1, kUnbounded);
  const Expr key = strings_ ? syntax_.choice({any_string(), bare}) : any_string();
  const Expr member = syntax_.sequence({key, colon(), any()});
  const Expr others = syntax_.repeat(syntax_.sequence({comma(), member}), 0, kUnbounded);
  return syntax_.sequence(
      {text("{"), space(), syntax_.optional(syntax_.sequence({member, others, space()})), text("}")});
}

Expr JsonText::make_any() {
  return syntax_.choice(
      {any_object(), any_array(), any_string(), any_number(), text("true"), text("false"), text("null")});
}

// The rule is recursive, so it is known before its body is made.
Expr JsonText::any() {
  if (!any_) {
    any_ = syntax_.add_rule("any JSON value");
    syntax_.define(*any_, make_any());
  }
  return syntax_.rule(*any_);
}

// ---- numbers ----

Expr JsonText::digit(char first, char last) {
  return syntax_.set({{static_cast<uint32_t>(first), static_cast<uint32_t>(last)}});
}

Expr JsonText::any_integer() {
  return syntax_.sequence(
      {syntax_.optional(text("-")),
       syntax_.choice({text("0"), syntax_.sequence({digit('1', '9'), digits(0, kMostDigits - 1)})})});
}

Expr JsonText::any_fraction() {
  return syntax_.optional(syntax_.sequence({text("."), digits(1, kMostDigits)}));
}

Expr JsonText::any_number() {
  // Larger exponents would make numbers that a double cannot hold, which readers of JSON refuse.
  const Expr exponent = syntax_.choice({syntax_.sequence({syntax_.optional(text("+")), digits(1, 2)}),
                                        syntax_.sequence({text("-"), digits(1, 3)})});
  const Expr power = syntax_.sequence({syntax_.set({{'E', 'E'}, {'e', 'e'}}), exponent});
  return syntax_.sequence({any_integer(), any_fraction(), syntax_.optional(power)});
}

Expr JsonText::with_decimals(uint32_t count) {
  return syntax_.sequence({any_integer(), syntax_.optional(syntax_.sequence({text("."), digits(1, count)}))});
}

// Numbers of the same number of digits, which may begin with 0.
Expr JsonText::same_length(std::string_view low, std::string_view high) {
  if (low.empty()) return syntax_.empty();
  const auto rest = static_cast<uint32_t>(low.size() - 1);
  const std::string least(rest, '0'), most(rest, '9');
  if (low[0] == high[0])
    return syntax_.sequence({digit(low[0], low[0]), same_length(low.substr(1), high.substr(1))});
  char first = low[0], last = high[0];
  std::vector<Expr> ways;
  if (low.substr(1) != least)
    ways.push_back(syntax_.sequence({digit(first, first), same_length(low.substr(1), most)})), ++first;
  if (high.substr(1) != most)
    ways.push_back(syntax_.sequence({digit(last, last), same_length(least, high.substr(1))})), --last;
  if (first <= last) ways.push_back(syntax_.sequence({digit(first, last), digits(rest, rest)}));
  return syntax_.choice(std::move(ways));
}

Expr JsonText::whole_between(uint64_t low, std::optional<uint64_t> high) {
  std::vector<Expr> ways;
  const std::string from = std::to_string(low),
                    to = high ? std::to_string(*high) : std::string(from.size(), '9');
  for (size_t size = from.size(); size <= to.size(); ++size) {
    const std::string least = size == from.size() ? from : "1" + std::string(size - 1, '0');
    const std::string most = size == to.size() ? to : std::string(size, '9');
    // Among the numbers of one digit, 0 is first. Longer ones have no leading zeros.
    if (least <= most) ways.push_back(same_length(least, most));
  }
  if (!high && from.size() < kMostDigits)
    ways.push_back(
        syntax_.sequence({digit('1', '9'), digits(static_cast<uint32_t>(from.size()), kMostDigits - 1)}));
  return syntax_.choice(std::move(ways));
}

Expr JsonText::integer_between(std::optional<int64_t> low, std::optional<int64_t> high) {
  std::vector<Expr> ways;
  const auto size = [](int64_t x) { return x < 0 ? 0 - static_cast<uint64_t>(x) : static_cast<uint64_t>(x); };
  if (!low || *low < 0) {
    const uint64_t least = !high || *high >= 0 ? 1 : size(*high);
    const std::optional<uint64_t> most = low ? std::optional(size(*low)) : std::nullopt;
    ways.push_back(syntax_.sequence({text("-"), whole_between(least, most)}));
  }
  if (!high || *high >= 0)
    ways.push_back(
        whole_between(low && *low > 0 ? size(*low) : 0, high ? std::optional(size(*high)) : std::nullopt));
  return syntax_.choice(std::move(ways));
}

// Each rule says which remainder the digits so far have.
Expr JsonText::multiple_of(uint32_t divisor) {
  std::vector<uint32_t> rules;
  for (uint32_t r = 0; r < divisor; ++r) rules.push_back(syntax_.add_rule("a remainder"));
  const auto steps = [&](uint32_t remainder, char first) {
    std::vector<Expr> ways;
    for (char d = first; d <= '9'; ++d)
      ways.push_back(syntax_.sequence(
          {digit(d, d), syntax_.rule(rules[(remainder * 10 + static_cast<uint32_t>(d - '0')) % divisor])}));
    return ways;
  };
  for (uint32_t r = 0; r < divisor; ++r) {
    std::vector<Expr> ways = steps(r, '0');
    if (r == 0) ways.push_back(syntax_.empty());
    syntax_.define(rules[r], syntax_.choice(std::move(ways)));
  }
  return syntax_.sequence(
      {syntax_.optional(text("-")), syntax_.choice({text("0"), syntax_.choice(steps(0, '1'))})});
}

// The digits after the point of both bounds, filled up with zeros to the same length.
struct JsonText::Fraction {
  std::string low, high;
  bool low_open, high_open;
};

// The digits from place `at` on. `low` and `high`: the digits so far equal those of that bound. `may_end`:
// the number may end here if it is between the bounds.
Expr JsonText::fraction_between(const Fraction& f, size_t at, bool low, bool high, bool may_end) {
  const bool low_rest_zero = f.low.find_first_not_of('0', at) == std::string::npos;
  const bool high_rest_zero = f.high.find_first_not_of('0', at) == std::string::npos;
  const bool ends =
      may_end && (!low || (low_rest_zero && !f.low_open)) && (!high || !high_rest_zero || !f.high_open);
  std::vector<Expr> ways;
  if (ends) ways.push_back(syntax_.empty());
  if (at == f.low.size()) {
    const bool exact_open = (low && f.low_open) || f.high_open;
    if (high && !exact_open) ways.push_back(syntax_.repeat(text("0"), 1, kMostDigits));
    if (!high && low && f.low_open)
      ways.push_back(syntax_.sequence({digits(0, kMostDigits), digit('1', '9'), digits(0, kMostDigits)}));
    if (!high && !(low && f.low_open)) ways.push_back(digits(1, kMostDigits));
    return syntax_.choice(std::move(ways));
  }
  char first = low ? f.low[at] : '0', last = high ? f.high[at] : '9';
  const auto bound = [&](char d) {
    const bool still_low = low && d == f.low[at], still_high = high && d == f.high[at];
    ways.push_back(syntax_.sequence({digit(d, d), fraction_between(f, at + 1, still_low, still_high, true)}));
  };
  if (low) bound(first);
  if (high && !(low && first == last)) bound(last);
  if (low) ++first;
  if (high) --last;
  if (first <= last) ways.push_back(syntax_.sequence({digit(first, last), digits(0, kMostDigits)}));
  return syntax_.choice(std::move(ways));
}

void JsonText::size_between(const Bound& low, const Bound& high, const std::string& sign,
                            std::vector<Expr>& out) {
  const auto whole = [](const Decimal& d) { return d.whole.empty() ? uint64_t{0} : std::stoull(d.whole); };
  const uint64_t from = whole(*low.value);
  Fraction f{low.value->fraction, high.value ? high.value->fraction : "", low.open, high.open};
  const size_t length = std::max(f.low.size(), f.high.size());
  f.low.resize(length, '0');
  f.high.resize(length, '0');
  const auto add = [&](Expr number, Expr after) {
    out.push_back(syntax_.sequence({text(sign), number, after}));
  };
  // A number whose whole part is that of a bound.
  const auto at_bound = [&](uint64_t part, bool is_low, bool is_high) {
    std::vector<Expr> ways = {syntax_.sequence({text("."), fraction_between(f, 0, is_low, is_high, false)})};
    const bool low_zero = f.low.find_first_not_of('0') == std::string::npos;
    const bool high_zero = f.high.find_first_not_of('0') == std::string::npos;
    if ((!is_low || (low_zero && !f.low_open)) && (!is_high || !high_zero || !f.high_open))
      ways.push_back(syntax_.empty());
    add(text(std::to_string(part)), syntax_.choice(std::move(ways)));
  };
  if (!high.value) {
    at_bound(from, true, false);
    add(whole_between(from + 1, std::nullopt), any_fraction());
    return;
  }
  const uint64_t to = whole(*high.value);
  if (from > to || (from == to && f.low > f.high)) return;
  if (from == to) {
    if (f.low != f.high || (!f.low_open && !f.high_open)) at_bound(from, true, true);
    return;
  }
  at_bound(from, true, false);
  if (from + 1 < to) add(whole_between(from + 1, to - 1), any_fraction());
  at_bound(to, false, true);
}

Expr JsonText::number_between(const Bound& low, const Bound& high) {
  const auto size = [](const Bound& b) {
    Bound positive = b;
    positive.value->negative = false;
    return positive;
  };
  const auto below_zero = [](const Bound& b) { return b.value && b.value->negative && !b.value->zero(); };
  const Bound zero{Decimal{}, false}, above_zero{Decimal{}, true};
  std::vector<Expr> ways;
  if (!low.value || below_zero(low))
    size_between(below_zero(high) ? size(high) : above_zero, low.value ? size(low) : Bound{}, "-", ways);
  if (!below_zero(high)) size_between(low.value && !below_zero(low) ? low : zero, high, "", ways);
  return syntax_.choice(std::move(ways));
}

}  // namespace thimble::grammar
