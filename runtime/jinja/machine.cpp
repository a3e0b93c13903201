#include "runtime/jinja/machine.h"

#include <algorithm>

#include "runtime/jinja/text.h"

namespace thimble::jinja {
namespace {

using Kind = Expression::Kind;

constexpr uint32_t kDeepestRun = 600;  // statements and expressions within each other, macros included
constexpr uint32_t kDeepestCall = 32;  // macros that call macros

Status bad(const std::string& what) { return error(Code::kInvalidArgument, "%s", what.c_str()); }

}  // namespace

Status need_defined(const Value& value) {
  const Undefined* undefined = as<Undefined>(value);
  if (!undefined) return {};
  if (!undefined->name) return bad("a value that is needed is undefined");
  return bad("'" + undefined->name->substr(0, 64) + "' is undefined");
}

Value* Scope::find(std::string_view name) {
  for (Scope* s = this; s; s = s->around)
    for (auto& [known, value] : s->variables)
      if (known == name) return &value;
  return nullptr;
}

void Scope::set(std::string_view name, Value value) {
  for (auto& [known, old] : variables) {
    if (known != name) continue;
    old = std::move(value);
    return;
  }
  variables.emplace_back(name, std::move(value));
}

template <typename Body>
auto Machine::within(Scope* around, Body body) {
  auto scope = std::make_unique<Scope>();
  scope->around = around;
  Scope* const before = std::exchange(scope_, scope.get());
  auto result = body();
  scope_ = before;
  if (scope->captured) kept_.push_back(std::move(scope));
  return result;
}

Result<std::string> Machine::render(const Block& block, const Dict& variables) {
  std::string out;
  out_ = &out;
  const auto done = within(nullptr, [&] {
    for (const auto& [key, value] : variables.items) scope_->set(*key, value);
    return within(scope_, [&] { return run(block); });
  });
  if (done.ok()) return out;
  if (raised_) return done.status();
  return error(done.status().code(), "the chat template, line %u: %s", line_,
               done.status().message().c_str());
}

Status Machine::raise(const std::string& text) {
  raised_ = true;
  return bad("the chat template refuses this: " + text);
}

// ---- statements ----

Result<Machine::Flow> Machine::run(const Block& block) {
  for (const Statement& s : block) {
    THIMBLE_LET(flow, run(s));
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Result<Machine::Flow> Machine::run(const Statement& s) {
  line_ = s.line;
  THIMBLE_TRY(heap_.spend_steps(1));
  if (depth_ >= kDeepestRun) return error(Code::kUnsupported, "the template nests too deeply");
  ++depth_;
  Result<Flow> flow = Flow::kNext;
  const auto done = [&]() -> Status {
    switch (s.kind) {
      case Statement::Kind::kText:
        return write_text(s.text);
      case Statement::Kind::kPrint: {
        THIMBLE_LET(value, evaluate(*s.value));
        return write(value);
      }
      case Statement::Kind::kIf:
        flow = run_if(s);
        break;
      case Statement::Kind::kFor:
        flow = run_for(s);
        break;
      case Statement::Kind::kSet: {
        THIMBLE_LET(value, evaluate(*s.value));
        return assign(s.target, value);
      }
      case Statement::Kind::kSetBlock: {
        THIMBLE_LET(value, captured(s));
        return assign(s.target, value);
      }
      case Statement::Kind::kFilter: {
        THIMBLE_LET(value, captured(s));
        return write(value);
      }
      case Statement::Kind::kMacro: {
        for (Scope* scope = scope_; scope; scope = scope->around) scope->captured = true;
        THIMBLE_TRY(heap_.spend_bytes(sizeof *scope_));
        THIMBLE_LET(closure, heap_.close(s.macro.get(), scope_));
        scope_->set(s.macro->name, closure);
        break;
      }
      case Statement::Kind::kScope:
        flow = within(scope_, [&] { return run(s.body); });
        break;
      case Statement::Kind::kBreak:
        flow = Flow::kBreak;
        break;
      case Statement::Kind::kContinue:
        flow = Flow::kContinue;
        break;
    }
    return {};
  }();
  --depth_;
  THIMBLE_TRY(done);
  return flow;
}

Result<Machine::Flow> Machine::run_if(const Statement& s) {
  for (const auto& [condition, body] : s.branches) {
    if (condition) {
      THIMBLE_LET(holds, evaluate(*condition));
      if (!truth(holds)) continue;
    }
    return run(body);
  }
  return Flow::kNext;
}

// The elements for which the condition holds.
Status Machine::choose(const Statement& s, const List& from, std::vector<Value>& items) {
  THIMBLE_TRY(heap_.spend_bytes(from.items.size() * sizeof(Value)));
  const std::vector<Value> all = from.items;  // as they are now, whatever the template does with the list
  if (!s.condition) {
    items = all;
    return {};
  }
  for (const Value& item : all) {
    const Result<bool> holds = within(scope_, [&]() -> Result<bool> {
      THIMBLE_TRY(assign(s.target, item));
      THIMBLE_LET(value, evaluate(*s.condition));
      return truth(value);
    });
    THIMBLE_TRY(holds);
    if (*holds) items.push_back(item);
  }
  return {};
}

Result<Machine::Flow> Machine::run_for(const Statement& s) {
  THIMBLE_LET(value, evaluate(*s.value));
  THIMBLE_LET(all, elements(heap_, value));
  std::vector<Value> items;
  THIMBLE_TRY(choose(s, *all, items));
  if (items.empty()) return within(scope_, [&] { return run(s.otherwise); });
  return run_turns(s, items);
}

Result<Machine::Flow> Machine::run_turns(const Statement& s, const std::vector<Value>& items) {
  // A loop that something still points to after its end must not point to elements that are gone. Its depth
  // is that of recursion, which is not known here.
  THIMBLE_LET(kept, heap_.list());
  kept->items = items;
  THIMBLE_LET(loop, heap_.loop(&kept->items, 1));
  for (; loop->index < kept->items.size(); ++loop->index) {
    const Result<Flow> flow = within(scope_, [&]() -> Result<Flow> {
      scope_->set("loop", loop);
      THIMBLE_TRY(assign(s.target, kept->items[loop->index]));
      return run(s.body);
    });
    THIMBLE_TRY(flow);
    if (*flow == Flow::kBreak) break;
  }
  return Flow::kNext;
}

Status Machine::write(const Value& value) {
  if (const std::string* text = as_text(value)) return write_text(*text);
  THIMBLE_LET(text, printed(heap_, value));
  return write_text(*text);
}

Status Machine::write_text(std::string_view text) {
  THIMBLE_TRY(heap_.spend_steps(text.size() / 64));
  THIMBLE_TRY(heap_.spend_output(text.size()));
  out_->append(text);
  return {};
}

Status Machine::assign(const Target& target, const Value& value) {
  if (!target.attribute.empty()) {
    Value* holder = scope_->find(target.names[0]);
    Namespace* const* space = holder ? as<Namespace*>(*holder) : nullptr;
    if (!space) return bad("'" + target.names[0] + "' is no namespace, so its attributes cannot be set");
    return heap_.set((*space)->attributes, std::make_shared<const std::string>(target.attribute), value);
  }
  // A scope may be kept for a macro, so what it holds counts.
  THIMBLE_TRY(heap_.spend_bytes(target.names.size() * sizeof scope_->variables[0]));
  THIMBLE_TRY(heap_.spend_steps(scope_->variables.size() / 16));
  if (!target.spread) {
    scope_->set(target.names[0], value);
    return {};
  }
  THIMBLE_LET(all, elements(heap_, value));
  if (all->items.size() != target.names.size())
    return bad(std::to_string(all->items.size()) + " values cannot be spread over " +
               std::to_string(target.names.size()) + " names");
  const std::vector<Value> items = all->items;
  for (size_t i = 0; i < items.size(); ++i) scope_->set(target.names[i], items[i]);
  return {};
}

Result<Value> Machine::captured(const Statement& s) {
  std::string text;
  std::string* const before = std::exchange(out_, &text);
  const Result<Flow> flow = within(scope_, [&] { return run(s.body); });
  out_ = before;
  THIMBLE_TRY(flow);
  THIMBLE_LET(value, heap_.text(std::move(text)));
  if (!s.filters) return std::move(value);
  return filtered(*s.filters, value);
}

Result<Value> Machine::filtered(const Expression& chain, const Value& subject) {
  if (chain.kind != Kind::kFilter) return subject;
  THIMBLE_LET(inner, filtered(*chain.parts[0], subject));
  return call_builtin(chain, *chain.builtin, inner);
}

// ---- expressions ----

Result<Value> Machine::evaluate(const Expression& e) {
  line_ = e.line;
  THIMBLE_TRY(heap_.spend_steps(1));
  if (e.kind == Kind::kConstant) return e.constant;
  if (depth_ >= kDeepestRun) return error(Code::kUnsupported, "the template nests too deeply");
  ++depth_;
  auto value = evaluate_node(e);
  --depth_;
  return value;
}

Result<Value> Machine::evaluate_node(const Expression& e) {
  switch (e.kind) {
    case Kind::kConstant:
      return e.constant;
    case Kind::kName:
      return name(e);
    case Kind::kList:
    case Kind::kTuple:
      return list(e);
    case Kind::kDict:
      return dict(e);
    case Kind::kSlice:
      return slice(e);
    case Kind::kUnary:
      return unary(e);
    case Kind::kBinary:
      return binary(e);
    case Kind::kCompare:
      return compare(e);
    case Kind::kCall:
      return call(e);
    case Kind::kAttribute: {
      THIMBLE_LET(of, evaluate(*e.parts[0]));
      return attribute(of, e.text);
    }
    case Kind::kItem: {
      THIMBLE_LET(of, evaluate(*e.parts[0]));
      THIMBLE_LET(key, evaluate(*e.parts[1]));
      return item(of, key);
    }
    case Kind::kAnd:
    case Kind::kOr: {
      THIMBLE_LET(left, evaluate(*e.parts[0]));
      if (truth(left) == (e.kind == Kind::kOr)) return std::move(left);
      return evaluate(*e.parts[1]);
    }
    case Kind::kIf: {
      THIMBLE_LET(condition, evaluate(*e.parts[0]));
      if (truth(condition)) return evaluate(*e.parts[1]);
      return e.parts[2] ? evaluate(*e.parts[2]) : Result<Value>(Undefined());
    }
    case Kind::kFilter:
    case Kind::kTest: {
      THIMBLE_LET(subject, evaluate(*e.parts[0]));
      return call_builtin(e, *e.builtin, subject);
    }
  }
  return Value();
}

Result<Value> Machine::name(const Expression& e) {
  for (const Scope* s = scope_; s; s = s->around) THIMBLE_TRY(heap_.spend_steps(s->variables.size() / 16));
  if (const Value* value = scope_->find(e.text)) {
    // A missing element that was given a name is missing under that name.
    return is<Undefined>(*value) ? Value(Undefined{&e.text}) : *value;
  }
  if (const Builtin* function = find_function(e.text)) return Value(function);
  return Value(Undefined{&e.text});
}

Result<Value> Machine::list(const Expression& e) {
  THIMBLE_LET(all, heap_.list(e.kind == Kind::kTuple));
  for (const ExpressionPtr& part : e.parts) {
    THIMBLE_LET(value, evaluate(*part));
    THIMBLE_TRY(heap_.append(*all, value));
  }
  return Value(all);
}

Result<Value> Machine::dict(const Expression& e) {
  THIMBLE_LET(all, heap_.dict());
  for (size_t i = 0; i < e.parts.size(); i += 2) {
    THIMBLE_LET(key, evaluate(*e.parts[i]));
    const Text kept = as_key(key);
    if (!kept)
      return bad(std::string("the key of a dict must be a text or an integer, and is ") + kind_name(key));
    THIMBLE_LET(value, evaluate(*e.parts[i + 1]));
    THIMBLE_TRY(heap_.set(*all, kept, value));
  }
  return Value(all);
}

namespace {

Result<Value> loop_attribute(const Loop& loop, const std::string& name, bool& known) {
  const auto count = static_cast<int64_t>(loop.items->size()), at = static_cast<int64_t>(loop.index);
  known = true;
  if (name == "index") return Value(at + 1);
  if (name == "index0") return Value(at);
  if (name == "revindex") return Value(count - at);
  if (name == "revindex0") return Value(count - at - 1);
  if (name == "first") return Value(at == 0);
  if (name == "last") return Value(at + 1 == count);
  if (name == "length") return Value(count);
  if (name == "depth") return Value(static_cast<int64_t>(loop.depth));
  if (name == "depth0") return Value(static_cast<int64_t>(loop.depth) - 1);
  if (name == "previtem" && at > 0) return (*loop.items)[loop.index - 1];
  if (name == "nextitem" && at + 1 < count) return (*loop.items)[loop.index + 1];
  known = false;
  return Value();
}

}  // namespace

Result<Value> Machine::attribute(const Value& of, const std::string& name) {
  THIMBLE_TRY(need_defined(of));
  if (const Builtin* method = find_method(of, name)) return heap_.bind(method, of);
  if (Dict* const* dict = as<Dict*>(of)) {
    if (const Value* value = (*dict)->find(name)) return *value;
  } else if (Namespace* const* space = as<Namespace*>(of)) {
    if (const Value* value = (*space)->attributes.find(name)) return *value;
  } else if (Loop* const* loop = as<Loop*>(of)) {
    bool known = false;
    auto value = loop_attribute(**loop, name, known);
    if (known) return value;
  }
  return Value(Undefined{&name});
}

Result<Value> Machine::item(const Value& of, const Value& key) {
  THIMBLE_TRY(need_defined(of));
  if (Dict* const* dict = as<Dict*>(of)) {
    const Text kept = as_key(key);
    if (const Value* value = kept ? (*dict)->find(*kept) : nullptr) return *value;
  }
  int64_t room = 0;
  if (const int64_t* integer = as_integer(key, room)) {
    const std::string* text = as_text(of);
    List* const* list = as<List*>(of);
    if (!text && !list) return Value();
    if (text) THIMBLE_TRY(heap_.spend_steps(text->size() / 16));
    const auto size = static_cast<int64_t>(text ? character_count(*text) : (*list)->items.size());
    const int64_t at = *integer < 0 ? *integer + size : *integer;
    if (at < 0 || at >= size) return Value();
    if (list) return (*list)->items[static_cast<size_t>(at)];
    return heap_.text(std::string(characters(*text, static_cast<size_t>(at), static_cast<size_t>(at) + 1)));
  }
  const Text* name = as<Text>(key);
  if (!name) return Value();
  THIMBLE_LET(value, attribute(of, **name));
  // The name belongs to the key, which may not live as long as the value.
  return is<Undefined>(value) ? Value() : value;
}

Result<Value> Machine::slice(const Expression& e) {
  THIMBLE_LET(of, evaluate(*e.parts[0]));
  THIMBLE_TRY(need_defined(of));
  int64_t bounds[3] = {0, 0, 1};
  bool given[3] = {};
  for (size_t i = 0; i < 3; ++i) {
    if (!e.parts[i + 1]) continue;
    THIMBLE_LET(bound, evaluate(*e.parts[i + 1]));
    int64_t room = 0;
    if (is<None>(bound)) continue;
    const int64_t* integer = as_integer(bound, room);
    if (!integer)
      return bad(std::string("the bound of a slice must be an integer, and is ") + kind_name(bound));
    bounds[i] = std::clamp<int64_t>(*integer, -(int64_t{1} << 40), int64_t{1} << 40);
    given[i] = true;
  }
  const std::string* text = as_text(of);
  List* const* list = as<List*>(of);
  if (!text && !list) return bad(std::string(kind_name(of)) + " has no slices");
  const int64_t step = bounds[2];
  if (step == 0) return bad("the step of a slice is 0");
  if (text) THIMBLE_TRY(heap_.spend_steps(text->size() / 16));
  const auto size = static_cast<int64_t>(text ? character_count(*text) : (*list)->items.size());
  const int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
  const auto place = [&](size_t i, int64_t otherwise) {
    if (!given[i]) return otherwise;
    return std::clamp(bounds[i] < 0 ? bounds[i] + size : bounds[i], low, high);
  };
  const int64_t first = place(0, step > 0 ? low : high), last = place(1, step > 0 ? high : low);
  if (text && step == 1)
    return heap_.text(std::string(
        characters(*text, static_cast<size_t>(first), static_cast<size_t>(std::max(first, last)))));
  std::vector<std::string_view> split;
  if (text) {
    THIMBLE_TRY(heap_.spend_bytes(text->size() * sizeof(std::string_view)));
    split = split_characters(*text);
  }
  std::string joined;
  THIMBLE_LET(all, heap_.list(list && (*list)->tuple));
  for (int64_t i = first; step > 0 ? i < last : i > last; i += step) {
    if (text)
      joined += split[static_cast<size_t>(i)];
    else
      THIMBLE_TRY(heap_.append(*all, (*list)->items[static_cast<size_t>(i)]));
  }
  return text ? heap_.text(std::move(joined)) : Result<Value>(all);
}

Result<Value> Machine::unary(const Expression& e) {
  THIMBLE_LET(value, evaluate(*e.parts[0]));
  const std::string& op = e.operators[0];
  if (op == "not") return Value(!truth(value));
  THIMBLE_TRY(need_defined(value));
  if (const double* real = as<double>(value)) return Value(op == "-" ? -*real : *real);
  int64_t room = 0;
  const int64_t* integer = as_integer(value, room);
  if (!integer) return bad(std::string(kind_name(value)) + " has no sign");
  if (op == "-") return arithmetic(heap_, "-", Value(int64_t{0}), Value(*integer));
  return Value(*integer);
}

Result<Value> Machine::binary(const Expression& e) {
  THIMBLE_LET(left, evaluate(*e.parts[0]));
  THIMBLE_LET(right, evaluate(*e.parts[1]));
  line_ = e.line;
  return arithmetic(heap_, e.operators[0], left, right);
}

Result<Value> Machine::compare(const Expression& e) {
  THIMBLE_LET(first, evaluate(*e.parts[0]));
  Value left = first;
  for (size_t i = 0; i < e.operators.size(); ++i) {
    THIMBLE_LET(right, evaluate(*e.parts[i + 1]));
    THIMBLE_LET(holds, compare(e.operators[i], left, right));
    if (!holds) return Value(false);
    left = right;
  }
  return Value(true);
}

Result<bool> Machine::compare(const std::string& op, const Value& a, const Value& b) {
  if (op == "==" || op == "!=") {
    THIMBLE_LET(same, equal(heap_, a, b));
    return same == (op == "==");
  }
  if (op == "in" || op == "not in") {
    THIMBLE_LET(there, contains(b, a));
    return there == (op == "in");
  }
  THIMBLE_TRY(need_defined(a));
  THIMBLE_TRY(need_defined(b));
  if (op == "<") return less(heap_, a, b);
  if (op == ">") return less(heap_, b, a);
  // Of a NaN neither holds, which no template asks.
  THIMBLE_LET(inverse, op == "<=" ? less(heap_, b, a) : less(heap_, a, b));
  return !inverse;
}

Result<bool> Machine::contains(const Value& in, const Value& what) {
  if (const std::string* text = as_text(in)) {
    const std::string* part = as_text(what);
    THIMBLE_TRY(need_defined(what));
    if (!part) return bad(std::string("a text holds no ") + (kind_name(what) + 2));
    THIMBLE_TRY(heap_.spend_steps((text->size() - std::min(text->size(), part->size())) * part->size() / 64));
    return text->find(*part) != std::string::npos;
  }
  if (Dict* const* dict = as<Dict*>(in)) {
    const Text key = as_key(what);
    return key && (*dict)->find(*key);
  }
  if (is<Undefined>(in)) return false;
  if (!is<List*>(in)) return bad(std::string(kind_name(in)) + " holds nothing that 'in' could find");
  for (const Value& item : (*as<List*>(in))->items) {
    THIMBLE_LET(same, equal(heap_, item, what));
    if (same) return true;
  }
  return false;
}

// ---- calls ----

Status Machine::arguments(const Expression& e, std::vector<Value>& positional, Keywords& keywords) {
  for (const ExpressionPtr& argument : e.arguments) {
    THIMBLE_LET(value, evaluate(*argument));
    positional.push_back(value);
  }
  for (const auto& [text, argument] : e.keywords) {
    THIMBLE_LET(value, evaluate(*argument));
    keywords.emplace_back(std::make_shared<const std::string>(text), value);
  }
  line_ = e.line;
  return {};
}

Result<Value> Machine::call_builtin(const Expression& e, const Builtin& builtin, const Value& self) {
  std::vector<Value> positional;
  Keywords keywords;
  THIMBLE_TRY(arguments(e, positional, keywords));
  return jinja::call_builtin(*this, builtin, self, std::move(positional), std::move(keywords));
}

Result<Value> Machine::call(const Expression& e) {
  const Expression& what = *e.parts[0];
  Value callee;
  if (what.kind == Kind::kAttribute) {
    THIMBLE_LET(self, evaluate(*what.parts[0]));
    THIMBLE_TRY(need_defined(self));
    // A method is called without making a value of it first.
    if (const Builtin* method = find_method(self, what.text)) return call_builtin(e, *method, self);
    THIMBLE_LET(found, attribute(self, what.text));
    if (is<Undefined>(found)) return bad(std::string(kind_name(self)) + " has no method '" + what.text + "'");
    callee = found;
  } else {
    THIMBLE_LET(found, evaluate(what));
    callee = found;
  }
  THIMBLE_TRY(need_defined(callee));
  if (const Builtin* const* function = as<const Builtin*>(callee))
    return call_builtin(e, **function, Value());
  if (Bound* const* bound = as<Bound*>(callee)) return call_builtin(e, *(*bound)->method, (*bound)->self);
  Closure* const* closure = as<Closure*>(callee);
  if (!closure) return bad(std::string(kind_name(callee)) + " cannot be called");
  std::vector<Value> positional;
  Keywords keywords;
  THIMBLE_TRY(arguments(e, positional, keywords));
  return call_macro(**closure, std::move(positional), keywords);
}

Result<Value> Machine::call_macro(const Closure& closure, std::vector<Value> positional,
                                  const Keywords& keywords) {
  if (calls_ >= kDeepestCall)
    return error(Code::kUnsupported, "the macro '%s' is called within itself too deeply",
                 closure.macro->name.c_str());
  ++calls_;
  std::string text;
  std::string* const before = std::exchange(out_, &text);
  const Result<Flow> flow = within(closure.scope, [&]() -> Result<Flow> {
    THIMBLE_TRY(bind(*closure.macro, std::move(positional), keywords));
    return run(closure.macro->body);
  });
  out_ = before;
  --calls_;
  THIMBLE_TRY(flow);
  return heap_.text(std::move(text));
}

Status Machine::bind(const Macro& macro, std::vector<Value> positional, const Keywords& keywords) {
  if (positional.size() > macro.parameters.size())
    return bad("the macro '" + macro.name + "' takes not more than " +
               std::to_string(macro.parameters.size()) + " arguments");
  for (const auto& [key, value] : keywords) {
    const auto named = [&wanted = *key](const auto& parameter) { return parameter.first == wanted; };
    const auto found = std::find_if(macro.parameters.begin(), macro.parameters.end(), named);
    if (found == macro.parameters.end())
      return bad("the macro '" + macro.name + "' has no parameter '" + *key + "'");
    if (found - macro.parameters.begin() < static_cast<std::ptrdiff_t>(positional.size()))
      return bad("the macro '" + macro.name + "' got two values for '" + *key + "'");
    scope_->set(found->first, value);
  }
  for (size_t i = 0; i < macro.parameters.size(); ++i) {
    const auto& [name, otherwise] = macro.parameters[i];
    if (i < positional.size()) {
      scope_->set(name, positional[i]);
      continue;
    }
    const bool given = std::any_of(keywords.begin(), keywords.end(),
                                   [&wanted = name](const auto& k) { return *k.first == wanted; });
    if (given) continue;
    Value value = Undefined{&name};
    if (otherwise) {
      THIMBLE_LET(evaluated, evaluate(*otherwise));
      value = evaluated;
    }
    scope_->set(name, std::move(value));
  }
  return {};
}

Result<Value> Machine::call_filter(const std::string& name, const Value& subject,
                                   std::vector<Value> arguments) {
  const Builtin* filter = find_filter(name);
  if (!filter) return bad("the filter '" + name.substr(0, 64) + "' is not known here");
  return jinja::call_builtin(*this, *filter, subject, std::move(arguments), {});
}

Result<bool> Machine::call_test(const std::string& name, const Value& subject, std::vector<Value> arguments) {
  const Builtin* test = find_test(name);
  if (!test) return bad("the test '" + name.substr(0, 64) + "' is not known here");
  THIMBLE_LET(value, jinja::call_builtin(*this, *test, subject, std::move(arguments), {}));
  return truth(value);
}

}  // namespace thimble::jinja
