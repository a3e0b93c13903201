// Functions that all templates can call.
#include <algorithm>
#include <cmath>

#include "templates/jinja/format.h"
#include "templates/jinja/machine.h"
#include "templates/jinja/table.h"

namespace thimble::jinja {
namespace {

// Fills the result of dict() or namespace() from a dict or pairs, then from keywords.
Status fill(Call& c, Dict& made) {
  if (Dict* const* from = as<Dict*>(c.arguments[0])) {
    for (const auto& [key, value] : (*from)->items) THIMBLE_TRY(c.heap.set(made, key, value));
  } else if (c.given(0)) {
    THIMBLE_LET(pairs, elements(c.heap, c.arguments[0]));
    for (const Value& pair : pairs->items) {
      THIMBLE_LET(both, elements(c.heap, pair));
      if (both->items.size() != 2)
        return error(Code::kInvalidArgument, "a dict is made of pairs, and one has %zu elements",
                     both->items.size());
      const Text key = as_key(both->items[0]);
      if (!key)
        return error(Code::kInvalidArgument, "the key of a dict must be a text or an integer, and is %s",
                     kind_name(both->items[0]));
      THIMBLE_TRY(c.heap.set(made, key, both->items[1]));
    }
  }
  for (const auto& [key, value] : c.keywords) THIMBLE_TRY(c.heap.set(made, key, value));
  return {};
}

Result<Value> run_dict(Call& c) {
  THIMBLE_LET(made, c.heap.dict());
  THIMBLE_TRY(fill(c, *made));
  return Value(made);
}

Result<Value> run_namespace(Call& c) {
  THIMBLE_LET(made, c.heap.new_namespace());
  THIMBLE_TRY(fill(c, made->attributes));
  return Value(made);
}

Result<Value> run_range(Call& c) {
  constexpr uint64_t kLongest = 100'000;  // the limit of Jinja's own sandbox
  THIMBLE_LET(first, c.integer(0, 0));
  THIMBLE_LET(last, c.integer(1, 0));
  THIMBLE_LET(step, c.integer(2, 1));
  if (!c.given(1)) std::swap(first, last);
  if (step == 0) return error(Code::kInvalidArgument, "the step of a range is 0");
  const auto low = static_cast<uint64_t>(std::min(first, last)),
             high = static_cast<uint64_t>(std::max(first, last));
  const bool empty = step > 0 ? first >= last : first <= last;
  const uint64_t stride = step > 0 ? static_cast<uint64_t>(step) : 0 - static_cast<uint64_t>(step);
  const uint64_t count = empty ? 0 : (high - low - 1) / stride + 1;
  if (count > kLongest)
    return error(Code::kUnsupported, "a range is longer than %d", static_cast<int>(kLongest));
  THIMBLE_LET(all, c.heap.list(List::Kind::kRange));
  all->shown =
      std::make_shared<const std::string>("range(" + std::to_string(first) + ", " + std::to_string(last) +
                                          (step == 1 ? ")" : ", " + std::to_string(step) + ")"));
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t value = static_cast<uint64_t>(first) + i * static_cast<uint64_t>(step);
    THIMBLE_TRY(c.heap.append(*all, static_cast<int64_t>(value)));
  }
  return Value(all);
}

Result<Value> run_raise(Call& c) {
  THIMBLE_LET(text, printed(c.heap, c.arguments[0]));
  return c.machine.raise(*text);
}

Result<Value> run_strftime_now(Call& c) {
  THIMBLE_LET(format, c.text(0));
  TextOut out(c.heap);
  THIMBLE_TRY(format_time(c.machine.now(), *format, out));
  return out.value();
}

Result<Value> run_cycler(Call& c) {
  if (c.rest.empty()) return error(Code::kInvalidArgument, "cycler needs at least one value");
  return c.heap.cycler(c.rest);
}

Result<Value> run_joiner(Call& c) {
  THIMBLE_LET(between,
              c.given(0) ? printed(c.heap, c.arguments[0]) : Text(std::make_shared<const std::string>(", ")));
  return c.heap.joiner(between);
}

constexpr Builtin kFunctions[] = {
    {"cycler", "*", run_cycler},
    {"dict", "?mapping **", run_dict},
    {"joiner", "?sep", run_joiner},
    {"namespace", "?mapping **", run_namespace},
    {"raise_exception", "message", run_raise},
    {"range", "start ?stop ?step", run_range},
    {"strftime_now", "format", run_strftime_now},
};

}  // namespace

const Builtin* find_function(std::string_view name) { return find_in(kFunctions, name); }

// ---- numbers ----

namespace {

Status no_operator(const std::string& op, const Value& a, const Value& b) {
  return error(Code::kInvalidArgument, "%s %s %s has no meaning", kind_name(a), op.c_str(), kind_name(b));
}

Status too_large() { return error(Code::kUnsupported, "a number becomes too large"); }

Result<Value> integer_power(int64_t a, int64_t b) {
  int64_t result = 1;
  for (; b > 0; b >>= 1) {
    if ((b & 1) && __builtin_mul_overflow(result, a, &result)) return too_large();
    if (b > 1 && __builtin_mul_overflow(a, a, &a)) return too_large();
  }
  return Value(result);
}

Result<Value> integers(const std::string& op, int64_t a, int64_t b) {
  int64_t result = 0;
  if (op == "+") return __builtin_add_overflow(a, b, &result) ? too_large() : Result<Value>(result);
  if (op == "-") return __builtin_sub_overflow(a, b, &result) ? too_large() : Result<Value>(result);
  if (op == "*") return __builtin_mul_overflow(a, b, &result) ? too_large() : Result<Value>(result);
  if (op == "**" && b >= 0) return integer_power(a, b);
  if (op == "**" && a != 0) return Value(std::pow(static_cast<double>(a), static_cast<double>(b)));
  if (b == 0 || op == "**") return error(Code::kInvalidArgument, "a number is divided by 0");
  if (op == "/") return Value(static_cast<double>(a) / static_cast<double>(b));
  if (b == -1) return op == "%" ? Result<Value>(int64_t{0}) : integers("-", 0, a);
  const int64_t rest = a % b != 0 && (a < 0) != (b < 0) ? a % b + b : a % b;  // has the sign of the divisor
  return Value(op == "%" ? rest : (a - rest) / b);
}

Result<Value> reals(const std::string& op, double a, double b) {
  if (op == "+") return Value(a + b);
  if (op == "-") return Value(a - b);
  if (op == "*") return Value(a * b);
  if (op == "**") {
    if (a < 0 && std::isfinite(b) && b != std::floor(b))
      return error(Code::kUnsupported, "a power is not a real number");
    if (a == 0 && b < 0) return error(Code::kInvalidArgument, "a number is divided by 0");
    const double power = std::pow(a, b);
    return std::isinf(power) && std::isfinite(a) && std::isfinite(b) ? too_large() : Result<Value>(power);
  }
  if (b == 0) return error(Code::kInvalidArgument, "a number is divided by 0");
  if (op == "/") return Value(a / b);
  // As in Python, the remainder is exact and has the sign of the divisor.
  double rest = std::fmod(a, b), whole = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) rest += b, whole -= 1;
  if (rest == 0) rest = std::copysign(0.0, b);
  if (op == "%") return Value(rest);
  if (whole == 0) return Value(std::copysign(0.0, a / b));
  const double below = std::floor(whole);
  return Value(whole - below > 0.5 ? below + 1 : below);
}

Result<Value> repeated(Heap& heap, const Value& what, int64_t count) {
  const std::string* text = as_text(what);
  const auto times = static_cast<uint64_t>(std::max<int64_t>(count, 0));
  if (text) {
    TextOut out(heap);
    out.add(times, *text);
    return out.value(is_markup(what));
  }
  const std::vector<Value>& items = (*as<List*>(what))->items;
  if (!items.empty() && times > UINT32_MAX / items.size()) return too_large();
  THIMBLE_LET(all, heap.list((*as<List*>(what))->kind));
  THIMBLE_TRY(heap.reserve(all->items, times * items.size()));
  for (uint64_t i = 0; i < times && !items.empty(); ++i)
    for (const Value& item : items) THIMBLE_TRY(heap.append(*all, item));
  return Value(all);
}

bool is_repeatable(const Value& v) { return is<Text>(v) || (is<List*>(v) && (*as<List*>(v))->is_plain()); }

Result<Value> joined(Heap& heap, const List& a, const List& b) {
  THIMBLE_LET(all, heap.list(a.kind));
  for (const List* list : {&a, &b})
    for (const Value& item : list->items) THIMBLE_TRY(heap.append(*all, item));
  return Value(all);
}

double as_real(const Value& v) {
  int64_t room = 0;
  const int64_t* integer = as_integer(v, room);
  return integer ? static_cast<double>(*integer) : *as<double>(v);
}

// a + b, where one of them is markup.
Result<Value> joined_markup(Heap& heap, const Value& a, const Value& b) {
  THIMBLE_LET(left, escaped(heap, a));
  THIMBLE_LET(right, escaped(heap, b));
  TextOut out(heap);
  out.reserve(left->size() + right->size());
  (out += *left) += *right;
  return out.value(true);
}

Result<Value> concatenated(Heap& heap, const Value& a, const Value& b) {
  THIMBLE_LET(left, printed(heap, a));
  THIMBLE_LET(right, printed(heap, b));
  TextOut out(heap);
  out.reserve(left->size() + right->size());
  (out += *left) += *right;
  return out.value();
}

}  // namespace

Result<Value> arithmetic(Heap& heap, const std::string& op, const Value& a, const Value& b) {
  if (op == "~") return concatenated(heap, a, b);
  if (op == "%" && is<Text>(a)) return percent_format(heap, *as<Text>(a), b);
  THIMBLE_TRY(need_defined(a));
  THIMBLE_TRY(need_defined(b));
  int64_t room_a = 0, room_b = 0;
  const int64_t *x = as_integer(a, room_a), *y = as_integer(b, room_b);
  if (x && y) return integers(op, *x, *y);
  if ((x || is<double>(a)) && (y || is<double>(b))) return reals(op, as_real(a), as_real(b));
  if (op == "+" && is<Text>(a) && is<Text>(b))
    return is_markup(a) || is_markup(b) ? joined_markup(heap, a, b) : concatenated(heap, a, b);
  if (op == "+" && is<List*>(a) && is<List*>(b) && (*as<List*>(a))->is_plain() &&
      (*as<List*>(a))->kind == (*as<List*>(b))->kind)
    return joined(heap, **as<List*>(a), **as<List*>(b));
  if (op == "*" && y && is_repeatable(a)) return repeated(heap, a, *y);
  if (op == "*" && x && is_repeatable(b)) return repeated(heap, b, *x);
  return no_operator(op, a, b);
}

}  // namespace thimble::jinja
