#include "templates/jinja/value.h"

#include <charconv>
#include <cmath>

#include "templates/jinja/text.h"

namespace thimble::jinja {
namespace {

// Estimated sizes of an index node of a dict with its bucket, and of a text without its characters.
constexpr uint64_t kIndexBytes = 80, kTextBytes = sizeof(std::string) + 32;

Status spend(uint64_t& left, uint64_t count, const char* what) {
  if (count > left) return error(Code::kUnsupported, "the template %s; it was stopped", what);
  left -= count;
  return {};
}

Status too_deep() {
  return error(Code::kUnsupported, "values are nested deeper than %u, or within themselves", kDeepestValue);
}

bool is_number(const Value& v) { return is<bool>(v) || is<int64_t>(v) || is<double>(v) || is<Digits>(v); }

int sign(std::string_view digits) { return digits[0] == '-' ? -1 : 1; }

// The same for a number beyond 64 bits and any number.
int compare_digits(std::string_view digits, const Value& other) {
  if (const double* real = as<double>(other)) {
    const double number = float_beyond(digits);
    return number < *real ? -1 : number > *real ? 1 : number == *real ? 0 : 2;
  }
  const Digits* number = as<Digits>(other);
  if (!number || sign(digits) != sign(*number->text)) return sign(digits);
  const bool longer = digits.size() != number->text->size();
  const int larger = longer ? (digits.size() > number->text->size() ? 1 : -1) : digits.compare(*number->text);
  return larger == 0 ? 0 : (larger > 0) == (sign(digits) > 0) ? 1 : -1;
}

// Compares exactly, as Python does: -1, 0, 1 for less, equal, greater; 2 if one is NaN.
int compare_numbers(const Value& a, const Value& b) {
  if (const Digits* digits = as<Digits>(a)) return compare_digits(*digits->text, b);
  int64_t room_a = 0, room_b = 0;
  const int64_t *x = as_integer(a, room_a), *y = as_integer(b, room_b);
  if (x && y) return *x < *y ? -1 : *x > *y;
  if (is<Digits>(b) || (!x && y)) {
    const int other = compare_numbers(b, a);
    return other == 2 ? 2 : -other;
  }
  const double real = *as<double>(b);
  if (!x) {
    const double left = *as<double>(a);
    return left < real ? -1 : left > real ? 1 : left == real ? 0 : 2;
  }
  if (std::isnan(real)) return 2;
  if (real >= 0x1p63) return -1;
  if (real < -0x1p63) return 1;
  const double whole = std::floor(real);
  const auto integer = static_cast<int64_t>(whole);
  return *x < integer ? -1 : *x > integer ? 1 : whole < real ? -1 : 0;
}

Result<bool> equal_at(Heap& heap, const Value& a, const Value& b, uint32_t depth);

Result<bool> equal_lists(Heap& heap, const List& a, const List& b, uint32_t depth) {
  if (a.items.size() != b.items.size() || a.kind != b.kind) return false;
  if (a.kind == List::Kind::kIterator) return &a == &b;
  for (size_t i = 0; i < a.items.size(); ++i) {
    THIMBLE_LET(same, equal_at(heap, a.items[i], b.items[i], depth + 1));
    if (!same) return false;
  }
  return true;
}

Result<bool> equal_dicts(Heap& heap, Dict& a, Dict& b, uint32_t depth) {
  if (a.items.size() != b.items.size()) return false;
  for (const auto& [key, value] : a.items) {
    const Value* other = b.find(*key);
    if (!other) return false;
    THIMBLE_LET(same, equal_at(heap, value, *other, depth + 1));
    if (!same) return false;
  }
  return true;
}

Result<bool> equal_at(Heap& heap, const Value& a, const Value& b, uint32_t depth) {
  THIMBLE_TRY(heap.spend_steps(1));
  THIMBLE_TRY(heap.check_stack());
  if (depth > kDeepestValue) return too_deep();
  if (is_number(a) && is_number(b)) return compare_numbers(a, b) == 0;
  if (a.index() != b.index()) return false;
  if (const std::string* text = as_text(a)) {
    THIMBLE_TRY(heap.spend_steps(text->size() / 64));
    return *text == *as_text(b);
  }
  if (is<List*>(a)) return equal_lists(heap, **as<List*>(a), **as<List*>(b), depth);
  if (is<Dict*>(a)) return equal_dicts(heap, **as<Dict*>(a), **as<Dict*>(b), depth);
  if (is<Undefined>(a) || is<None>(a)) return true;
  if (is<Bound*>(a)) return *as<Bound*>(a) == *as<Bound*>(b);
  if (is<Namespace*>(a)) return *as<Namespace*>(a) == *as<Namespace*>(b);
  if (is<Loop*>(a)) return *as<Loop*>(a) == *as<Loop*>(b);
  if (is<Closure*>(a)) return *as<Closure*>(a) == *as<Closure*>(b);
  if (is<Cycler*>(a)) return *as<Cycler*>(a) == *as<Cycler*>(b);
  if (is<Joiner*>(a)) return *as<Joiner*>(a) == *as<Joiner*>(b);
  return *as<const Builtin*>(a) == *as<const Builtin*>(b);
}

Result<bool> less_at(Heap& heap, const Value& a, const Value& b, uint32_t depth) {
  THIMBLE_TRY(heap.spend_steps(1));
  THIMBLE_TRY(heap.check_stack());
  if (depth > kDeepestValue) return too_deep();
  if (is_number(a) && is_number(b)) return compare_numbers(a, b) == -1;
  if (const std::string* x = as_text(a), *y = as_text(b); x && y) {
    THIMBLE_TRY(heap.spend_steps(std::min(x->size(), y->size()) / 64));
    return *x < *y;  // byte order of UTF-8 equals code point order
  }
  if (is<List*>(a) && is<List*>(b) && (*as<List*>(a))->is_plain() &&
      (*as<List*>(a))->kind == (*as<List*>(b))->kind) {
    const auto &x = (*as<List*>(a))->items, &y = (*as<List*>(b))->items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      THIMBLE_LET(same, equal_at(heap, x[i], y[i], depth + 1));
      if (!same) return less_at(heap, x[i], y[i], depth + 1);
    }
    return x.size() < y.size();
  }
  return error(Code::kInvalidArgument, "%s and %s have no order", kind_name(a), kind_name(b));
}

class Printer {
 public:
  explicit Printer(Heap& heap) : out(heap), heap_(heap) {}
  Status print(const Value& value, uint32_t depth);
  TextOut out;

 private:
  Status print_list(const List& list, uint32_t depth);
  Status print_dict(const Dict& dict, uint32_t depth);

  Heap& heap_;
};

Status Printer::print_list(const List& list, uint32_t depth) {
  const bool tuple = list.kind == List::Kind::kTuple;
  const char* view = list.kind == List::Kind::kKeys     ? "dict_keys"
                     : list.kind == List::Kind::kValues ? "dict_values"
                     : list.kind == List::Kind::kItems  ? "dict_items"
                                                        : nullptr;
  if (list.kind == List::Kind::kRange || list.kind == List::Kind::kIterator) {
    out += list.shown ? std::string_view(*list.shown) : "<an iterator>";
    return {};
  }
  if (view) (out += view) += "(";
  out += tuple ? '(' : '[';
  for (size_t i = 0; i < list.items.size(); ++i) {
    if (i) out += ", ";
    THIMBLE_TRY(print(list.items[i], depth + 1));
  }
  if (tuple && list.items.size() == 1) out += ',';
  out += tuple ? ')' : ']';
  if (view) out += ')';
  return {};
}

Status Printer::print_dict(const Dict& dict, uint32_t depth) {
  out += '{';
  for (size_t i = 0; i < dict.items.size(); ++i) {
    out += i ? ", " : "";
    THIMBLE_TRY(print(key_value(dict.items[i].first), depth + 1));
    out += ": ";
    THIMBLE_TRY(print(dict.items[i].second, depth + 1));
  }
  out += '}';
  return {};
}

Status Printer::print(const Value& value, uint32_t depth) {
  if (depth > kDeepestValue) return too_deep();
  THIMBLE_TRY(heap_.check_stack());
  if (const std::string* text = as_text(value)) {
    if (is_markup(value) && depth) out += "Markup(";
    if (depth)
      quote(*text, out);
    else
      out += *text;
    if (is_markup(value) && depth) out += ')';
  } else if (is<Undefined>(value))
    out += depth ? "Undefined" : "";
  else if (is<None>(value))
    out += "None";
  else if (const bool* flag = as<bool>(value))
    out += *flag ? "True" : "False";
  else if (const int64_t* integer = as<int64_t>(value))
    out += std::to_string(*integer);
  else if (const double* real = as<double>(value))
    out += float_text(*real);
  else if (const Digits* digits = as<Digits>(value))
    out += *digits->text;
  else if (is<List*>(value))
    return print_list(**as<List*>(value), depth);
  else if (is<Dict*>(value))
    return print_dict(**as<Dict*>(value), depth);
  else
    out += std::string("<") + kind_name(value) + ">";
  THIMBLE_TRY(out.status());  // checked now, so that a list with a million references to one text ends early
  return heap_.spend_steps(1);
}

}  // namespace

Value* Dict::find(std::string_view key) {
  const auto found = index.find(key);
  return found == index.end() ? nullptr : &items[found->second].second;
}

void Dict::set(const Text& key, Value value) {
  if (Value* old = find(*key)) {
    *old = std::move(value);
    return;
  }
  items.emplace_back(key, std::move(value));
  index.emplace(*items.back().first, items.size() - 1);
}

Status Heap::spend_steps(uint64_t count) { return spend(left_.steps, count, "takes too many steps"); }
Status Heap::spend_bytes(uint64_t count) {
  THIMBLE_TRY(spend_steps(count / 64));
  return spend(left_.bytes, count, "makes too many values, or too large ones");
}
Status Heap::spend_output(uint64_t count) { return spend(left_.output, count, "writes too much"); }

Status Heap::check_stack() const {
  return stack_is_short(stack_) ? error(Code::kUnsupported, "the template nests too deeply") : Status();
}

bool stack_is_short(const char* from) {
  const char* const here = static_cast<const char*>(__builtin_frame_address(0));
  return from && (from > here ? from - here : here - from) > static_cast<std::ptrdiff_t>(kMostStack);
}

Recursion::Recursion(Heap& heap) : heap_(heap), before_(heap.stack_) {
  if (!before_) heap_.stack_ = static_cast<const char*>(__builtin_frame_address(0));
}
Recursion::~Recursion() { heap_.stack_ = before_; }

void TextOut::reserve(size_t more) {
  if (status_.ok()) status_ = heap_.reserve(text_, more);
}

void TextOut::add(std::string_view text) {
  reserve(text.size());
  if (status_.ok()) text_ += text;
}

void TextOut::add(size_t count, std::string_view text) {
  if (!text.empty() && count > SIZE_MAX / text.size())
    status_ = heap_.spend_bytes(UINT64_MAX);
  else
    reserve(count * text.size());
  for (size_t i = 0; i < count && !text.empty() && status_.ok(); ++i) text_ += text;
}

Result<std::string> TextOut::take() {
  THIMBLE_TRY(status_);
  return std::exchange(text_, {});
}

Result<Value> TextOut::value(bool markup) {
  THIMBLE_TRY(status_);
  return heap_.keep(std::exchange(text_, {}), markup);
}

Result<Value> Heap::text(std::string_view text, bool markup) {
  THIMBLE_TRY(spend_bytes(text.size() + kTextBytes));
  return Value(Text(std::make_shared<const std::string>(text), markup));
}

Result<Value> Heap::keep(std::string text, bool markup) {
  THIMBLE_TRY(spend_bytes(kTextBytes));
  return Value(Text(std::make_shared<const std::string>(std::move(text)), markup));
}

Result<Value> Heap::digits(std::string_view text) {
  THIMBLE_TRY(spend_bytes(text.size() + kTextBytes));
  return Value(Digits{std::make_shared<const std::string>(text)});
}

Result<List*> Heap::list(List::Kind kind) {
  THIMBLE_TRY(spend_bytes(sizeof(List)));
  lists_.push_back({{}, kind, {}, false});
  return &lists_.back();
}

Result<Dict*> Heap::dict() {
  THIMBLE_TRY(spend_bytes(sizeof(Dict)));
  return &dicts_.emplace_back();
}

Result<Namespace*> Heap::new_namespace() {
  THIMBLE_TRY(spend_bytes(sizeof(Namespace)));
  return &namespaces_.emplace_back();
}

Result<Loop*> Heap::loop(const Loop& like) {
  THIMBLE_TRY(spend_bytes(sizeof(Loop)));
  loops_.push_back(like);
  return &loops_.back();
}

Result<Value> Heap::cycler(std::vector<Value> items) {
  THIMBLE_TRY(spend_bytes(sizeof(Cycler) + items.size() * sizeof(Value)));
  cyclers_.push_back({std::move(items), 0});
  return Value(&cyclers_.back());
}

Result<Value> Heap::joiner(const Text& between) {
  THIMBLE_TRY(spend_bytes(sizeof(Joiner)));
  joiners_.push_back({between, false});
  return Value(&joiners_.back());
}

Result<Value> Heap::bind(const Builtin* method, Value self) {
  THIMBLE_TRY(spend_bytes(sizeof(Bound)));
  bounds_.push_back({method, std::move(self)});
  return Value(&bounds_.back());
}

Result<Value> Heap::close(const Macro* macro, Scope* scope) {
  THIMBLE_TRY(spend_bytes(sizeof(Closure)));
  closures_.push_back({macro, scope});
  return Value(&closures_.back());
}

Status Heap::append(List& to, Value value) {
  THIMBLE_TRY(reserve(to.items, 1));
  to.items.push_back(std::move(value));
  return {};
}

Status Heap::set(Dict& in, const Text& key, Value value) {
  THIMBLE_TRY(reserve(in.items, 1));
  THIMBLE_TRY(spend_bytes(kIndexBytes));
  in.set(key, std::move(value));
  return {};
}

constexpr std::string_view kIntegerKey("\0integer ", 9);

Text as_key(const Value& value) {
  if (const Text* text = as<Text>(value)) return *text;
  int64_t room = 0;
  const int64_t* integer = as_integer(value, room);
  if (!integer) return nullptr;
  return std::make_shared<const std::string>(std::string(kIntegerKey) + std::to_string(*integer));
}

Value key_value(const Text& key) {
  if (!key->starts_with(kIntegerKey)) return key;
  int64_t integer = 0;
  std::from_chars(key->data() + kIntegerKey.size(), key->data() + key->size(), integer);
  return integer;
}

const std::string* as_text(const Value& value) {
  const Text* text = as<Text>(value);
  return text ? text->get() : nullptr;
}

const int64_t* as_integer(const Value& value, int64_t& room) {
  if (const bool* flag = as<bool>(value)) {
    room = *flag;
    return &room;
  }
  return as<int64_t>(value);
}

bool is_markup(const Value& value) {
  const Text* text = as<Text>(value);
  return text && text->markup;
}

Value make_text(std::string_view text) { return Value(std::make_shared<const std::string>(text)); }

const char* kind_name(const Value& value) {
  constexpr const char* kNames[] = {"an undefined value",
                                    "None",
                                    "a boolean",
                                    "an integer",
                                    "a float",
                                    "an integer beyond 64 bits",
                                    "a text",
                                    "a list",
                                    "a dict",
                                    "a namespace",
                                    "a loop",
                                    "a macro",
                                    "a function",
                                    "a method",
                                    "a cycler",
                                    "a joiner"};
  static_assert(std::size(kNames) == std::variant_size_v<Value>);
  if (List* const* list = as<List*>(value)) {
    constexpr const char* kLists[] = {"a list",          "a tuple",        "a range",    "a dict's keys",
                                      "a dict's values", "a dict's items", "an iterator"};
    return kLists[static_cast<size_t>((*list)->kind)];
  }
  return kNames[value.index()];
}

bool truth(const Value& value) {
  if (is<Undefined>(value) || is<None>(value)) return false;
  if (const bool* flag = as<bool>(value)) return *flag;
  if (const int64_t* integer = as<int64_t>(value)) return *integer != 0;
  if (const double* real = as<double>(value)) return *real != 0;
  if (const std::string* text = as_text(value)) return !text->empty();
  if (List* const* list = as<List*>(value))
    return (*list)->kind == List::Kind::kIterator || !(*list)->items.empty();
  if (is<Dict*>(value)) return !(*as<Dict*>(value))->items.empty();
  return true;
}

Result<bool> equal(Heap& heap, const Value& a, const Value& b) { return equal_at(heap, a, b, 0); }
Result<bool> less(Heap& heap, const Value& a, const Value& b) { return less_at(heap, a, b, 0); }

Result<Text> printed(Heap& heap, const Value& value) {
  if (const Text* text = as<Text>(value)) return *text;
  const Recursion recursion(heap);
  Printer printer(heap);
  THIMBLE_TRY(printer.print(value, 0));
  THIMBLE_LET(text, printer.out.value());
  return *as<Text>(text);
}

Result<List*> elements(Heap& heap, const Value& value) {
  List* const* list = as<List*>(value);
  if (list && (*list)->kind != List::Kind::kIterator) return *list;
  THIMBLE_LET(all, heap.list());
  if (list) {
    all->items.swap((*list)->items);
    return all;
  }
  if (Dict* const* dict = as<Dict*>(value)) {
    for (const auto& [key, unused] : (*dict)->items) THIMBLE_TRY(heap.append(*all, key_value(key)));
  } else if (const std::string* text = as_text(value)) {
    for (std::string_view rest = *text; !rest.empty();) {
      THIMBLE_LET(one, heap.text(take_character(rest)));
      THIMBLE_TRY(heap.append(*all, one));
    }
  } else if (!is<Undefined>(value)) {
    return error(Code::kInvalidArgument, "%s cannot be iterated over", kind_name(value));
  }
  return all;
}

}  // namespace thimble::jinja
