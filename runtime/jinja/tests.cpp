// Tests: x is NAME.
#include "runtime/jinja/machine.h"
#include "runtime/jinja/table.h"
#include "runtime/jinja/text.h"

namespace thimble::jinja {
namespace {

template <typename... Kinds>
Result<Value> is_any(Call& c) {
  return Value((is<Kinds>(c.self) || ...));
}

template <bool expected>
Result<Value> is_flag(Call& c) {
  const bool* flag = as<bool>(c.self);
  return Value(flag && *flag == expected);
}

Result<Value> is_defined(Call& c) { return Value(!is<Undefined>(c.self)); }

template <bool negated>
Result<Value> is_equal(Call& c) {
  THIMBLE_LET(same, equal(c.heap, c.self, c.arguments[0]));
  return Value(same != negated);
}

// Whether less(self, argument), or less(argument, self) where `swapped`, is what is expected.
template <bool swapped, bool expected>
Result<Value> is_ordered(Call& c) {
  THIMBLE_TRY(need_defined(c.self));
  THIMBLE_TRY(need_defined(c.arguments[0]));
  THIMBLE_LET(holds, swapped ? less(c.heap, c.arguments[0], c.self) : less(c.heap, c.self, c.arguments[0]));
  return Value(holds == expected);
}

Result<Value> is_in(Call& c) {
  THIMBLE_LET(all, elements(c.heap, c.arguments[0]));
  for (const Value& item : all->items) {
    THIMBLE_LET(same, equal(c.heap, item, c.self));
    if (same) return Value(true);
  }
  return Value(false);
}

Result<Value> is_divisible(Call& c) {
  THIMBLE_LET(rest, arithmetic(c.heap, "%", c.self, c.arguments[0]));
  return Value(!truth(rest));
}

template <bool odd>
Result<Value> is_odd(Call& c) {
  THIMBLE_LET(rest, arithmetic(c.heap, "%", c.self, Value(int64_t{2})));
  return Value(truth(rest) == odd);
}

template <std::string (*changed)(std::string_view)>
Result<Value> is_written(Call& c) {
  const std::string* text = as_text(c.self);
  return Value(text && changed(*text) == *text && upper(*text) != lower(*text));
}

constexpr Builtin kTests[] = {
    {"boolean", "", is_any<bool>},
    {"callable", "", is_any<Closure*, const Builtin*, Bound*>},
    {"defined", "", is_defined},
    {"divisibleby", "num", is_divisible},
    {"eq", "other", is_equal<false>},
    {"equalto", "other", is_equal<false>},
    {"even", "", is_odd<false>},
    {"false", "", is_flag<false>},
    {"float", "", is_any<double>},
    {"ge", "other", is_ordered<false, false>},
    {"greaterthan", "other", is_ordered<true, true>},
    {"gt", "other", is_ordered<true, true>},
    {"in", "seq", is_in},
    {"integer", "", is_any<int64_t>},
    {"iterable", "", is_any<Text, List*, Dict*, Loop*, Undefined>},
    {"le", "other", is_ordered<true, false>},
    {"lessthan", "other", is_ordered<false, true>},
    {"lower", "", is_written<lower>},
    {"lt", "other", is_ordered<false, true>},
    {"mapping", "", is_any<Dict*>},
    {"ne", "other", is_equal<true>},
    {"none", "", is_any<None>},
    {"number", "", is_any<bool, int64_t, double>},
    {"odd", "", is_odd<true>},
    {"sequence", "", is_any<Text, List*, Dict*, Undefined>},
    {"string", "", is_any<Text>},
    {"true", "", is_flag<true>},
    {"undefined", "", is_any<Undefined>},
    {"upper", "", is_written<upper>},
};

}  // namespace

const Builtin* find_test(std::string_view name) { return find_in(kTests, name); }

}  // namespace thimble::jinja
