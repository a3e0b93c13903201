// Filters, tests, functions and methods: what a template finds without defining it, each kind in one table.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "templates/jinja/value.h"

namespace thimble::jinja {

class Machine;

// One call of a builtin, its arguments in the order of the parameters.
struct Call {
  Machine& machine;
  Heap& heap;
  Value self;                    // a filter's and a test's subject, what a method is called on
  std::vector<Value> arguments;  // by parameter; undefined where not given
  std::vector<Value> rest;       // where the parameters have "*"
  std::vector<std::pair<Text, Value>> keywords;  // where they have "**"

  // An argument as a text, a flag, a whole number; `otherwise` where it was not given.
  Result<Text> text(size_t i) const;
  bool flag(size_t i, bool otherwise = false) const;
  Result<int64_t> integer(size_t i, int64_t otherwise) const;
  // A copy of a text, marked as HTML where `self` is.
  Result<Value> made(std::string_view text) const { return heap.text(text, is_markup(self)); }
  bool given(size_t i) const { return !is<Undefined>(arguments[i]); }
};

struct Builtin {
  const char* name;
  // Names in order: "old new ?count", those after ? optional. "*" takes any more, "**" any keywords; names
  // behind "*" are keywords only.
  const char* parameters;
  Result<Value> (*run)(Call&);
};

// Null where there is none of this name.
const Builtin* find_filter(std::string_view name);
const Builtin* find_test(std::string_view name);
const Builtin* find_function(std::string_view name);
const Builtin* find_method(const Value& self, std::string_view name);
// Whether Python has a method of this name that changes the value: no template may call it.
bool changes(const Value& self, std::string_view name);

// The text of a value, escaped for HTML where it is no markup.
Result<Text> escaped(Heap& heap, const Value& value);

// Calls it with arguments by position and by keyword, checked against the parameters.
Result<Value> call_builtin(Machine& machine, const Builtin& builtin, const Value& self,
                           std::vector<Value> positional, std::vector<std::pair<Text, Value>> keywords);

// The tables' parts that have files of their own.
const Builtin* find_text_filter(std::string_view name);
Result<Value> to_json(Call& call);
Result<Value> from_json(Call& call);
// Writes seconds since 1970 of the clock on the wall as strftime does, in English; the conversions that dates
// need.
Status format_time(int64_t seconds, std::string_view format, TextOut& out);

}  // namespace thimble::jinja
