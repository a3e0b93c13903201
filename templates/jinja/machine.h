// Runs the syntax tree of a template.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "templates/jinja/builtins.h"
#include "templates/jinja/syntax.h"

namespace thimble::jinja {

// Variables of one block of the template. Names that are not found here are looked up in the enclosing scope.
struct Scope {
  Scope* around = nullptr;
  std::vector<std::pair<std::string_view, Value>> variables;
  bool captured = false;  // a macro was defined here, which may be called after the block ended

  Value* find(std::string_view name);
  void set(std::string_view name, Value value);
};

class Machine {
 public:
  // `now`: wall-clock seconds since 1970, for strftime_now.
  Machine(Heap& heap, int64_t now) : heap_(heap), now_(now) {}

  // The text that the template writes. Errors name the line, except those that the template raises itself
  // (raise_exception), which are passed on in its own words.
  Result<std::string> render(const Block& block, const Dict& variables);

  // ---- for builtins ----
  Heap& heap() { return heap_; }
  int64_t now() const { return now_; }
  // x.name and x[key]; undefined if there is no such member.
  Result<Value> attribute(const Value& of, const std::string& name);
  Result<Value> item(const Value& of, const Value& key);
  Result<bool> contains(const Value& in, const Value& what);
  Result<Value> call_filter(const std::string& name, const Value& subject, std::vector<Value> arguments);
  Result<bool> call_test(const std::string& name, const Value& subject, std::vector<Value> arguments);
  // Implements raise_exception.
  Status raise(const std::string& text);

 private:
  enum class Flow { kNext, kBreak, kContinue };
  using Keywords = std::vector<std::pair<Text, Value>>;

  // ---- statements ----
  Result<Flow> run(const Block& block);
  Result<Flow> run(const Statement& s);
  Result<Flow> run_if(const Statement& s);
  Result<Flow> run_for(const Statement& s);
  // `depth` is 1, and increases with each call of `loop` inside.
  Result<Flow> run_for(const Statement& s, const Value& value, size_t depth);
  Result<Flow> run_turns(const Statement& s, const std::vector<Value>& items, size_t depth);
  Result<Flow> run_with(const Statement& s);
  Status run_call(const Statement& s);
  Status choose(const Statement& s, const List& from, std::vector<Value>& items);
  Status write(const Value& value);
  Status write_text(std::string_view text);
  Status assign(const Target& target, const Value& value);
  // The text that a body writes, after the statement's filters.
  Result<Value> captured(const Statement& s);
  Result<Value> filtered(const Expression& chain, const Value& subject);
  // Runs `body()` in a new scope.
  template <typename Body>
  auto within(Scope* around, Body body);
  // The text that `body()` writes.
  template <typename Body>
  Result<Value> written(Body body);
  // Keeps the current scopes alive for something that is called later.
  Status keep_scopes();

  // ---- expressions ----
  Result<Value> evaluate(const Expression& e);
  Result<Value> evaluate_node(const Expression& e);
  Result<Value> name(const Expression& e);
  Result<Value> list(const Expression& e);
  Result<Value> dict(const Expression& e);
  Result<Value> slice(const Expression& e);
  Result<Value> unary(const Expression& e);
  Result<Value> binary(const Expression& e);
  Result<Value> compare(const Expression& e);
  Result<bool> compare(const std::string& op, const Value& a, const Value& b);
  // `caller`: the macro of a call statement, or null.
  Result<Value> call(const Expression& e, const Value* caller = nullptr);
  Result<Value> apply(const Expression& e, const Value& subject);
  Result<Value> call_loop(const Loop& loop, const std::vector<Value>& positional);
  Result<Value> call_macro(const Closure& closure, std::vector<Value> positional, Keywords keywords);
  Status bind(const Macro& macro, std::vector<Value> positional, Keywords keywords);
  Status bind_rest(const Macro& macro, const std::vector<Value>& positional, Keywords& keywords);
  Status arguments(const Expression& e, std::vector<Value>& positional, Keywords& keywords);

  Heap& heap_;
  const int64_t now_;
  TextOut* out_ = nullptr;
  Scope* scope_ = nullptr;
  std::vector<std::unique_ptr<Scope>> kept_;  // scopes that macros still refer to
  uint32_t line_ = 0, calls_ = 0;
  bool raised_ = false;
};

// Arithmetic on a and b; op is "+", "-", "*", "/", "//", "%", "**" or "~".
Result<Value> arithmetic(Heap& heap, const std::string& op, const Value& a, const Value& b);

// Fails with "'x' is undefined" if the value is undefined.
Status need_defined(const Value& value);

// Lists and dicts cannot be keys of dicts, nor be looked up in them.
Status need_hashable(const Value& value);

}  // namespace thimble::jinja
