// Tests: x is NAME.
#include "templates/jinja/letters.h"
#include "templates/jinja/machine.h"
#include "templates/jinja/table.h"

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

Result<Value> is_escaped(Call& c) { return Value(is_markup(c.self)); }
Result<Value> is_defined(Call& c) { return Value(!is<Undefined>(c.self)); }

template <bool negated>
Result<Value> is_equal(Call& c) {
  THIMBLE_LET(same, equal(c.heap, c.self, c.arguments[0]));
  return Value(same != negated);
}

// Whether less(self, argument), or less(argument, self) if `swapped`, equals `expected`.
template <bool swapped, bool expected>
Result<Value> is_ordered(Call& c) {
  THIMBLE_TRY(need_defined(c.self));
  THIMBLE_TRY(need_defined(c.arguments[0]));
  THIMBLE_LET(holds, swapped ? less(c.heap, c.arguments[0], c.self) : less(c.heap, c.self, c.arguments[0]));
  return Value(holds == expected);
}

Result<Value> is_in(Call& c) {
  THIMBLE_LET(there, c.machine.contains(c.arguments[0], c.self));
  return Value(there);
}

Result<Value> is_divisible(Call& c) {
  THIMBLE_LET(rest, arithmetic(c.heap, "%", c.self, c.arguments[0]));
  THIMBLE_LET(none, equal(c.heap, rest, Value(int64_t{0})));
  return Value(none);
}

template <bool odd>
Result<Value> is_odd(Call& c) {
  THIMBLE_LET(rest, arithmetic(c.heap, "%", c.self, Value(int64_t{2})));
  THIMBLE_LET(holds, equal(c.heap, rest, Value(int64_t{odd})));
  return Value(holds);
}

template <bool (*holds)(std::string_view)>
Result<Value> is_written(Call& c) {
  THIMBLE_LET(text, printed(c.heap, c.self));
  THIMBLE_TRY(c.heap.spend_steps(text->size() / 16));
  return Value(holds(*text));
}

// Whether both are the same object, not just equal; small values have no identity, so they are compared.
Result<Value> is_same(Call& c) {
  const Value& other = c.arguments[0];
  if (c.self.index() != other.index()) return Value(false);
  if (List* const* list = as<List*>(c.self)) return Value(*list == *as<List*>(other));
  if (Dict* const* dict = as<Dict*>(c.self)) return Value(*dict == *as<Dict*>(other));
  THIMBLE_LET(same, equal(c.heap, c.self, other));
  return Value(same);
}

template <const Builtin* (*find)(std::string_view)>
Result<Value> is_name_of(Call& c) {
  THIMBLE_TRY(need_hashable(c.self));
  const std::string* name = as_text(c.self);
  return Value(name && find(*name));
}

Result<Value> is_sequence(Call& c) {
  List* const* list = as<List*>(c.self);
  return Value(list ? (*list)->has_places() : is<Text>(c.self) || is<Dict*>(c.self) || is<Undefined>(c.self));
}

constexpr Builtin kTests[] = {
    {"!=", "other", is_equal<true>},
    {"<", "other", is_ordered<false, true>},
    {"<=", "other", is_ordered<true, false>},
    {"==", "other", is_equal<false>},
    {">", "other", is_ordered<true, true>},
    {">=", "other", is_ordered<false, false>},
    {"boolean", "", is_any<bool>},
    {"callable", "", is_any<Closure*, const Builtin*, Bound*, Loop*, Joiner*, Undefined>},
    {"defined", "", is_defined},
    {"divisibleby", "num", is_divisible},
    {"eq", "other", is_equal<false>},
    {"equalto", "other", is_equal<false>},
    {"escaped", "", is_escaped},
    {"even", "", is_odd<false>},
    {"filter", "", is_name_of<find_filter>},
    {"false", "", is_flag<false>},
    {"float", "", is_any<double>},
    {"ge", "other", is_ordered<false, false>},
    {"greaterthan", "other", is_ordered<true, true>},
    {"gt", "other", is_ordered<true, true>},
    {"in", "seq", is_in},
    {"integer", "", is_any<int64_t, Digits>},
    {"iterable", "", is_any<Text, List*, Dict*, Loop*, Undefined>},
    {"le", "other", is_ordered<true, false>},
    {"lessthan", "other", is_ordered<false, true>},
    {"lower", "", is_written<is_lower>},
    {"lt", "other", is_ordered<false, true>},
    {"mapping", "", is_any<Dict*>},
    {"ne", "other", is_equal<true>},
    {"none", "", is_any<None>},
    {"number", "", is_any<bool, int64_t, double, Digits>},
    {"odd", "", is_odd<true>},
    {"sameas", "other", is_same},
    {"sequence", "", is_sequence},
    {"string", "", is_any<Text>},
    {"test", "", is_name_of<find_test>},
    {"true", "", is_flag<true>},
    {"undefined", "", is_any<Undefined>},
    {"upper", "", is_written<is_upper>},
};

}  // namespace

const Builtin* find_test(std::string_view name) { return find_in(kTests, name); }

}  // namespace thimble::jinja
