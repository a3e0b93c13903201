#include "templates/jinja/machine.h"

#include <algorithm>

#include "templates/jinja/text.h"

namespace thimble::jinja {
namespace {

using Kind = Expression::Kind;

constexpr uint32_t kDeepestCall = 32;  // nesting of macro calls

Status bad(const std::string& what) { return error(Code::kInvalidArgument, "%s", what.c_str()); }

}  // namespace

Status need_defined(const Value& value) {
  const Undefined* undefined = as<Undefined>(value);
  if (!undefined) return {};
  if (!undefined->name) return bad("a value that is needed is undefined");
  return bad("'" + undefined->name->substr(0, 64) + "' is undefined");
}

Status need_hashable(const Value& value) {
  List* const* list = as<List*>(value);
  if (!is<Dict*>(value) && !(list && (*list)->kind == List::Kind::kList)) return {};
  return bad(std::string(kind_name(value)) + " cannot be a key");
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

template <typename Body>
Result<Value> Machine::written(Body body) {
  TextOut text(heap_);
  TextOut* const before = std::exchange(out_, &text);
  const Result<Flow> flow = body();
  out_ = before;
  THIMBLE_TRY(flow);
  return text.value();
}

Status Machine::keep_scopes() {
  for (Scope* scope = scope_; scope; scope = scope->around) scope->captured = true;
  return heap_.spend_bytes(sizeof *scope_);
}

Result<std::string> Machine::render(const Block& block, const Dict& variables) {
  const Recursion recursion(heap_);
  TextOut out(heap_);
  out_ = &out;
  const auto done = within(nullptr, [&] {
    for (const auto& [key, value] : variables.items) scope_->set(*key, value);
    return within(scope_, [&] { return run(block); });
  });
  if (done.ok()) return out.take();
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
  THIMBLE_TRY(heap_.check_stack());
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
        THIMBLE_TRY(keep_scopes());
        THIMBLE_LET(closure, heap_.close(s.macro.get(), scope_));
        scope_->set(s.macro->name, closure);
        break;
      }
      case Statement::Kind::kCall:
        return run_call(s);
      case Statement::Kind::kWith:
        flow = run_with(s);
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

// The elements for which the loop's condition holds.
Status Machine::choose(const Statement& s, const List& from, std::vector<Value>& items) {
  // `all`, `items`, and the loop's own copy
  THIMBLE_TRY(heap_.spend_bytes(3 * from.items.size() * sizeof(Value)));
  const std::vector<Value> all = from.items;  // a copy, because the template may change the list
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
    if (*holds) THIMBLE_TRY(heap_.reserve(items, 1));
    if (*holds) items.push_back(item);
  }
  return {};
}

Result<Machine::Flow> Machine::run_for(const Statement& s) {
  THIMBLE_LET(value, evaluate(*s.value));
  if (s.recursive) THIMBLE_TRY(keep_scopes());
  return run_for(s, value, 1);
}

Result<Machine::Flow> Machine::run_for(const Statement& s, const Value& value, size_t depth) {
  THIMBLE_LET(all, elements(heap_, value));
  std::vector<Value> items;
  THIMBLE_TRY(choose(s, *all, items));
  return run_turns(s, items, depth);
}

Result<Machine::Flow> Machine::run_turns(const Statement& s, const std::vector<Value>& items, size_t depth) {
  // Something may still refer to the loop after its end, so the elements must stay alive.
  THIMBLE_LET(kept, heap_.list());
  kept->items = items;
  THIMBLE_LET(loop, heap_.loop({&kept->items, 0, depth, s.recursive ? &s : nullptr, scope_}));
  bool any = false;  // whether any iteration ran to its end
  for (; loop->index < kept->items.size(); ++loop->index) {
    const Result<Flow> flow = within(scope_, [&]() -> Result<Flow> {
      scope_->set("loop", loop);
      THIMBLE_TRY(assign(s.target, kept->items[loop->index]));
      return run(s.body);
    });
    THIMBLE_TRY(flow);
    if (*flow == Flow::kBreak) break;
    any = any || *flow == Flow::kNext;
  }
  if (!any) return within(scope_, [&] { return run(s.otherwise); });
  return Flow::kNext;
}

Result<Machine::Flow> Machine::run_with(const Statement& s) {
  std::vector<Value> values;
  for (const auto& [target, value] : s.assignments) {
    THIMBLE_LET(evaluated, evaluate(*value));
    values.push_back(evaluated);
  }
  return within(scope_, [&]() -> Result<Flow> {
    for (size_t i = 0; i < values.size(); ++i) THIMBLE_TRY(assign(s.assignments[i].first, values[i]));
    return run(s.body);
  });
}

Status Machine::run_call(const Statement& s) {
  THIMBLE_TRY(keep_scopes());
  THIMBLE_LET(caller, heap_.close(s.macro.get(), scope_));
  THIMBLE_LET(value, call(*s.value, &caller));
  return write(value);
}

Status Machine::write(const Value& value) {
  if (const std::string* text = as_text(value)) return write_text(*text);
  THIMBLE_LET(text, printed(heap_, value));
  return write_text(*text);
}

Status Machine::write_text(std::string_view text) {
  THIMBLE_TRY(heap_.spend_steps(text.size() / 64));
  THIMBLE_TRY(heap_.spend_output(text.size()));
  out_->add(text);
  return out_->status();
}

Status Machine::assign(const Target& target, const Value& value) {
  if (!target.attribute.empty()) {
    Value* holder = scope_->find(target.name);
    Namespace* const* space = holder ? as<Namespace*>(*holder) : nullptr;
    if (!space) return bad("'" + target.name + "' is not a namespace, so its attributes cannot be set");
    return heap_.set((*space)->attributes, std::make_shared<const std::string>(target.attribute), value);
  }
  // A macro may keep a scope alive, so its contents count towards the limits.
  if (target.parts.empty()) {
    THIMBLE_TRY(heap_.reserve(scope_->variables, 1));
    THIMBLE_TRY(heap_.spend_steps(scope_->variables.size() / 16));
    scope_->set(target.name, value);
    return {};
  }
  THIMBLE_TRY(heap_.check_stack());
  THIMBLE_LET(all, elements(heap_, value));
  if (all->items.size() != target.parts.size())
    return bad(std::to_string(all->items.size()) + " values cannot be spread over " +
               std::to_string(target.parts.size()) + " names");
  for (size_t i = 0; i < target.parts.size(); ++i) THIMBLE_TRY(assign(target.parts[i], all->items[i]));
  return {};
}

Result<Value> Machine::captured(const Statement& s) {
  THIMBLE_LET(value, written([&] { return within(scope_, [&] { return run(s.body); }); }));
  if (!s.filters) return std::move(value);
  return filtered(*s.filters, value);
}

Result<Value> Machine::filtered(const Expression& chain, const Value& subject) {
  if (chain.kind != Kind::kFilter) return subject;
  THIMBLE_TRY(heap_.check_stack());
  THIMBLE_LET(inner, filtered(*chain.parts[0], subject));
  return apply(chain, inner);
}

// ---- expressions ----

Result<Value> Machine::evaluate(const Expression& e) {
  line_ = e.line;
  THIMBLE_TRY(heap_.spend_steps(1));
  if (e.kind == Kind::kConstant) return e.constant;
  THIMBLE_TRY(heap_.check_stack());
  return evaluate_node(e);
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
      return apply(e, subject);
    }
  }
  return Value();
}

Result<Value> Machine::name(const Expression& e) {
  for (const Scope* s = scope_; s; s = s->around) THIMBLE_TRY(heap_.spend_steps(s->variables.size() / 16));
  if (const Value* value = scope_->find(e.text)) {
    // An undefined element that is assigned to a name is reported under that name.
    return is<Undefined>(*value) ? Value(Undefined{&e.text}) : *value;
  }
  if (const Builtin* function = find_function(e.text)) return Value(function);
  return Value(Undefined{&e.text});
}

Result<Value> Machine::list(const Expression& e) {
  THIMBLE_LET(all, heap_.list(e.kind == Kind::kTuple ? List::Kind::kTuple : List::Kind::kList));
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
  if (changes(of, name)) return Value(Undefined{&name});
  if (Dict* const* dict = as<Dict*>(of)) {
    if (const Value* value = (*dict)->find(name)) return *value;
  } else if (Namespace* const* space = as<Namespace*>(of)) {
    if (const Value* value = (*space)->attributes.find(name)) return *value;
  } else if (Loop* const* loop = as<Loop*>(of)) {
    bool known = false;
    auto value = loop_attribute(**loop, name, known);
    if (known) return value;
  } else if (Cycler* const* cycler = as<Cycler*>(of)) {
    if (name == "current") return (*cycler)->items[(*cycler)->at];
  } else if (List* const* list = as<List*>(of); list && (*list)->group) {
    if (name == "grouper" || name == "list") return (*list)->items[name == "list"];
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
    if (!text && !(list && (*list)->has_places())) return Value();
    if (text) THIMBLE_TRY(heap_.spend_steps(text->size() / 16));
    const auto size = static_cast<int64_t>(text ? character_count(*text) : (*list)->items.size());
    const int64_t at = *integer < 0 ? *integer + size : *integer;
    if (at < 0 || at >= size) return Value();
    if (list) return (*list)->items[static_cast<size_t>(at)];
    return heap_.text(characters(*text, static_cast<size_t>(at), static_cast<size_t>(at) + 1), is_markup(of));
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
  if (!text && !(list && (*list)->has_places())) return bad(std::string(kind_name(of)) + " has no slices");
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
    return heap_.text(
        characters(*text, static_cast<size_t>(first), static_cast<size_t>(std::max(first, last))),
        is_markup(of));
  std::vector<std::string_view> split;
  if (text) THIMBLE_TRY(heap_.reserve(split, static_cast<uint64_t>(size)));
  for (std::string_view rest = text ? *text : std::string_view(); !rest.empty();)
    split.push_back(take_character(rest));
  TextOut joined(heap_);
  THIMBLE_LET(all, heap_.list(list && (*list)->is_plain() ? (*list)->kind : List::Kind::kList));
  for (int64_t i = first; step > 0 ? i < last : i > last; i += step) {
    if (text)
      joined += split[static_cast<size_t>(i)];
    else
      THIMBLE_TRY(heap_.append(*all, (*list)->items[static_cast<size_t>(i)]));
  }
  return text ? joined.value(is_markup(of)) : Result<Value>(all);
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
  // With a NaN both comparisons are false in Python; we do not handle that, because no template compares NaN.
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
    THIMBLE_TRY(need_hashable(what));
    const Text key = as_key(what);
    return key && (*dict)->find(*key);
  }
  if (is<Undefined>(in)) return false;
  if (!is<List*>(in)) return bad(std::string(kind_name(in)) + " holds nothing that 'in' could find");
  THIMBLE_LET(all, elements(heap_, in));
  for (const Value& item : all->items) {
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
  if (e.more) {
    THIMBLE_LET(value, evaluate(*e.more));
    THIMBLE_TRY(need_defined(value));
    THIMBLE_LET(all, elements(heap_, value));
    THIMBLE_TRY(heap_.reserve(positional, all->items.size()));
    positional.insert(positional.end(), all->items.begin(), all->items.end());
  }
  if (e.more_keywords) {
    THIMBLE_LET(value, evaluate(*e.more_keywords));
    Dict* const* more = as<Dict*>(value);
    if (!more) return bad(std::string("** spreads a dict, and this is ") + kind_name(value));
    THIMBLE_TRY(heap_.reserve(keywords, (*more)->items.size()));
    for (const auto& [key, given] : (*more)->items) {
      const auto same = [&wanted = *key](const auto& keyword) { return *keyword.first == wanted; };
      if (!is<Text>(key_value(key))) return bad("the keywords after ** must be texts");
      if (std::any_of(keywords.begin(), keywords.begin() + static_cast<std::ptrdiff_t>(e.keywords.size()),
                      same))
        return bad("the keyword '" + key->substr(0, 64) + "' is given twice");
      keywords.emplace_back(key, given);
    }
  }
  line_ = e.line;
  return {};
}

// Applies a filter or a test.
Result<Value> Machine::apply(const Expression& e, const Value& subject) {
  if (!e.builtin)
    return error(Code::kUnsupported, "the %s '%s' is not known here",
                 e.kind == Kind::kTest ? "test" : "filter", e.text.substr(0, 64).c_str());
  std::vector<Value> positional;
  Keywords keywords;
  THIMBLE_TRY(arguments(e, positional, keywords));
  return jinja::call_builtin(*this, *e.builtin, subject, std::move(positional), std::move(keywords));
}

Result<Value> Machine::call(const Expression& e, const Value* caller) {
  const Expression& what = *e.parts[0];
  const Builtin* builtin = nullptr;
  Value self;
  Value callee;
  if (what.kind == Kind::kAttribute) {
    THIMBLE_LET(of, evaluate(*what.parts[0]));
    THIMBLE_TRY(need_defined(of));
    self = of;
    builtin = find_method(self, what.text);  // avoids creating a value for the method
    if (!builtin) {
      if (changes(self, what.text))
        return bad("'" + what.text + "' would change " + kind_name(self) + ", which a template must not");
      THIMBLE_LET(found, attribute(self, what.text));
      if (is<Undefined>(found))
        return bad(std::string(kind_name(self)) + " has no method '" + what.text + "'");
      callee = found;
    }
  } else {
    THIMBLE_LET(found, evaluate(what));
    callee = found;
  }
  if (!builtin) THIMBLE_TRY(need_defined(callee));
  if (const Builtin* const* function = as<const Builtin*>(callee)) builtin = *function;
  if (Bound* const* bound = as<Bound*>(callee)) {
    builtin = (*bound)->method;
    self = (*bound)->self;
  }
  std::vector<Value> positional;
  Keywords keywords;
  THIMBLE_TRY(arguments(e, positional, keywords));
  if (caller) keywords.emplace_back(std::make_shared<const std::string>("caller"), *caller);
  if (builtin) return call_builtin(*this, *builtin, self, std::move(positional), std::move(keywords));
  if (Closure* const* closure = as<Closure*>(callee))
    return call_macro(**closure, std::move(positional), std::move(keywords));
  if (Loop* const* loop = as<Loop*>(callee)) return call_loop(**loop, positional);
  if (Joiner* const* joiner = as<Joiner*>(callee))
    return std::exchange((*joiner)->used, true) ? Value((*joiner)->between) : make_text("");
  return bad(std::string(kind_name(callee)) + " cannot be called");
}

// loop(items): runs the body of a recursive loop again.
Result<Value> Machine::call_loop(const Loop& loop, const std::vector<Value>& positional) {
  if (!loop.recursive) return bad("only {% for ... recursive %} makes a loop that can be called");
  if (positional.size() != 1) return bad("a recursive loop is called with one argument, its new elements");
  if (calls_ >= kDeepestCall) return error(Code::kUnsupported, "a loop is called within itself too deeply");
  ++calls_;
  Scope* const before = std::exchange(scope_, loop.scope);
  auto text = written([&] { return run_for(*loop.recursive, positional[0], loop.depth + 1); });
  scope_ = before;
  --calls_;
  return text;
}

Result<Value> Machine::call_macro(const Closure& closure, std::vector<Value> positional, Keywords keywords) {
  if (calls_ >= kDeepestCall)
    return error(Code::kUnsupported, "the macro '%s' is called within itself too deeply",
                 closure.macro->name.c_str());
  ++calls_;
  auto text = written([&] {
    return within(closure.scope, [&]() -> Result<Flow> {
      THIMBLE_TRY(bind(*closure.macro, std::move(positional), std::move(keywords)));
      return run(closure.macro->body);
    });
  });
  --calls_;
  return text;
}

// Binds `varargs`, `kwargs` and `caller` if the macro's body uses them.
Status Machine::bind_rest(const Macro& macro, const std::vector<Value>& positional, Keywords& keywords) {
  const size_t count = macro.parameters.size();
  if (macro.takes_caller) {
    const auto given = std::find_if(keywords.begin(), keywords.end(),
                                    [](const auto& keyword) { return *keyword.first == "caller"; });
    static const std::string kCaller = "caller";
    scope_->set("caller", given == keywords.end() ? Value(Undefined{&kCaller}) : given->second);
    if (given != keywords.end()) keywords.erase(given);
  }
  if (macro.takes_keywords) {
    THIMBLE_LET(rest, heap_.dict());
    // A parameter with a positional value cannot also be given by name.
    const auto open =
        macro.parameters.begin() + static_cast<std::ptrdiff_t>(std::min(count, positional.size()));
    const auto known = [&](const auto& keyword) {
      return std::any_of(open, macro.parameters.end(),
                         [&](const auto& parameter) { return parameter.first == *keyword.first; });
    };
    for (const auto& keyword : keywords)
      if (!known(keyword)) THIMBLE_TRY(heap_.set(*rest, keyword.first, keyword.second));
    std::erase_if(keywords, [&](const auto& keyword) { return !known(keyword); });
    scope_->set("kwargs", Value(rest));
  }
  if (macro.takes_more) {
    THIMBLE_LET(rest, heap_.list(List::Kind::kTuple));
    for (size_t i = count; i < positional.size(); ++i) THIMBLE_TRY(heap_.append(*rest, positional[i]));
    scope_->set("varargs", Value(rest));
  } else if (positional.size() > count) {
    return bad("the macro '" + macro.name + "' takes at most " + std::to_string(count) + " arguments");
  }
  return {};
}

Status Machine::bind(const Macro& macro, std::vector<Value> positional, Keywords keywords) {
  THIMBLE_TRY(bind_rest(macro, positional, keywords));
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
