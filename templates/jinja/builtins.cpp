#include "templates/jinja/builtins.h"

#include <algorithm>

#include "templates/jinja/machine.h"
#include "templates/jinja/text.h"

namespace thimble::jinja {
namespace {

// The parameter names in "old new ?count".
struct Parameters {
  std::vector<std::string_view> names;
  size_t required = 0, positional = 0;
  bool any_more = false, any_keyword = false;

  explicit Parameters(std::string_view words);
  // The index of a name, or size() if it is not a parameter.
  size_t find(std::string_view name) const {
    return static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
  }
};

Parameters::Parameters(std::string_view words) {
  while (!words.empty()) {
    const size_t end = std::min(words.find(' '), words.size());
    const std::string_view word = words.substr(0, end);
    words.remove_prefix(std::min(end + 1, words.size()));
    if (word == "*") {
      any_more = true;
    } else if (word == "**") {
      any_keyword = true;
    } else {
      const bool optional = word[0] == '?';
      names.push_back(word.substr(optional));
      required += !optional;
      positional += !any_more;
    }
  }
}

Status wrong(const Builtin& builtin, const char* what) {
  return error(Code::kInvalidArgument, "'%s' %s; its parameters are '%s'", builtin.name, what,
               builtin.parameters);
}

}  // namespace

Result<Text> Call::text(size_t i) const {
  if (const Text* text = as<Text>(arguments[i])) return *text;
  return error(Code::kInvalidArgument, "a text is expected as an argument, and %s was given",
               kind_name(arguments[i]));
}

bool Call::flag(size_t i, bool otherwise) const { return given(i) ? truth(arguments[i]) : otherwise; }

Result<int64_t> Call::integer(size_t i, int64_t otherwise) const {
  if (!given(i)) return otherwise;
  int64_t room = 0;
  if (const int64_t* integer = as_integer(arguments[i], room)) return *integer;
  return error(Code::kInvalidArgument, "an integer is expected as an argument, and %s was given",
               kind_name(arguments[i]));
}

Result<Text> escaped(Heap& heap, const Value& value) {
  THIMBLE_LET(text, printed(heap, value));
  if (is_markup(value)) return text;
  TextOut out(heap);
  escape(*text, out);
  THIMBLE_LET(made, out.value(true));
  return *as<Text>(made);
}

Result<Value> call_builtin(Machine& machine, const Builtin& builtin, const Value& self,
                           std::vector<Value> positional, std::vector<std::pair<Text, Value>> keywords) {
  // Filters may call other filters by name: map('map', 'map', ...).
  THIMBLE_TRY(machine.heap().check_stack());
  THIMBLE_TRY(machine.heap().spend_bytes(2 * positional.size() * sizeof(Value)));
  const Parameters parameters(builtin.parameters);
  Call call{machine, machine.heap(), self, {}, {}, {}};
  call.arguments.resize(parameters.names.size());
  std::vector<bool> given(parameters.names.size());
  for (size_t i = 0; i < positional.size(); ++i) {
    if (i < parameters.positional) {
      call.arguments[i] = std::move(positional[i]);
      given[i] = true;
    } else if (parameters.any_more) {
      call.rest.push_back(std::move(positional[i]));
    } else {
      return wrong(builtin, "has too many arguments");
    }
  }
  for (auto& [name, value] : keywords) {
    const size_t at = parameters.find(*name);
    if (at < parameters.names.size()) {
      call.arguments[at] = std::move(value);
      given[at] = true;
    } else if (parameters.any_keyword) {
      call.keywords.emplace_back(name, std::move(value));
    } else {
      return wrong(builtin, "has no such keyword");
    }
  }
  for (size_t i = 0; i < parameters.required; ++i)
    if (!given[i]) return wrong(builtin, "lacks an argument");
  return builtin.run(call);
}

}  // namespace thimble::jinja
