// Filters, tests, functions and methods that a template can use without defining them. Each kind has one
// table.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "templates/jinja/value.h"

namespace thimble::jinja {

class Machine;

// A call of a builtin, with its arguments in the order of the parameters.
struct Call {
  Machine& machine;
  Heap& heap;
  Value self;                                    // the subject of a filter or test, or the object of a method
  std::vector<Value> arguments;                  // by parameter; undefined if not given
  std::vector<Value> rest;                       // further arguments, if the parameters have "*"
  std::vector<std::pair<Text, Value>> keywords;  // further keywords, if the parameters have "**"

  // An argument as a text, a flag or a whole number; `otherwise` if it was not given.
  Result<Text> text(size_t i) const;
  bool flag(size_t i, bool otherwise = false) const;
  Result<int64_t> integer(size_t i, int64_t otherwise) const;
  // A new text, marked as HTML if `self` is.
  Result<Value> made(std::string_view text) const { return heap.text(text, is_markup(self)); }
  bool given(size_t i) const { return !is<Undefined>(arguments[i]); }
};

struct Builtin {
  const char* name;
  // Names in order: "old new ?count"; those after ? are optional. "*" accepts any further arguments, "**" any
  // keywords. Names after "*" can only be given as keywords.
  const char* parameters;
  Result<Value> (*run)(Call&);
};

// The builtin of this name, or null.
const Builtin* find_filter(std::string_view name);
const Builtin* find_test(std::string_view name);
const Builtin* find_function(std::string_view name);
const Builtin* find_method(const Value& self, std::string_view name);
// Whether Python has a method of this name that changes the value. Templates may not call it.
bool changes(const Value& self, std::string_view name);

// The text of a value, escaped for HTML unless it is markup.
Result<Text> escaped(Heap& heap, const Value& value);

// Calls a builtin with positional and keyword arguments, which are checked against its parameters.
Result<Value> call_builtin(Machine& machine, const Builtin& builtin, const Value& self,
                           std::vector<Value> positional, std::vector<std::pair<Text, Value>> keywords);

// The parts of the tables that are in files of their own.
const Builtin* find_text_filter(std::string_view name);
Result<Value> to_json(Call& call);
Result<Value> from_json(Call& call);
// Formats wall-clock seconds since 1970 as strftime does, in English. Supports the conversions that dates
// need.
Status format_time(int64_t seconds, std::string_view format, TextOut& out);

}  // namespace thimble::jinja
