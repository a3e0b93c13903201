// Values of a running template, as in Python: none, booleans, integers, floats, texts, lists,
// insertion-ordered dicts, and callables.
//
// Nothing changes a list or dict once a template can see it. Namespaces are shared by reference and may
// contain themselves. For that reason a Heap owns all of these until the rendering ends, and a Value only
// points to them. Texts cannot contain other values and are reference-counted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"

namespace thimble::jinja {

struct Bound;
struct Builtin;
struct Closure;
struct Cycler;
struct Dict;
struct Joiner;
struct List;
struct Loop;
struct Macro;
struct Namespace;
struct Scope;
struct Statement;

// A missing variable, attribute or element. `name` is used in messages and belongs to the template.
struct Undefined {
  const std::string* name = nullptr;
};
struct None {};
struct Text : std::shared_ptr<const std::string> {
  using Base = std::shared_ptr<const std::string>;
  using Base::Base;
  Text(Base text, bool marked = false) : Base(std::move(text)), markup(marked) {}
  // HTML whose special characters are escaped (|safe, |escape). Texts that are joined to it with + or % are
  // escaped too.
  bool markup = false;
};

// An integer beyond 64 bits, which templates can print and compare but not compute with.
struct Digits {
  std::shared_ptr<const std::string> text;
};

using Value = std::variant<Undefined, None, bool, int64_t, double, Digits, Text, List*, Dict*, Namespace*,
                           Loop*, Closure*, const Builtin*, Bound*, Cycler*, Joiner*>;

// An ordered sequence: a list or one of its variants, which differ in how they print, compare and can be
// used.
struct List {
  // kKeys, kValues and kItems are returned by methods of dicts. kIterator is returned by map() and similar
  // filters: its elements can be read once, and it has neither a length nor an accessible end.
  enum class Kind : uint8_t { kList, kTuple, kRange, kKeys, kValues, kItems, kIterator };
  std::vector<Value> items;
  Kind kind = Kind::kList;
  Text shown;          // how a range prints
  bool group = false;  // result of groupby: a tuple whose elements have names

  bool is_plain() const { return kind == Kind::kList || kind == Kind::kTuple; }
  bool has_places() const { return is_plain() || kind == Kind::kRange; }
};

// A dict. Keys are texts; integer keys are stored as unlikely texts (as_key, key_value).
struct Dict {
  std::vector<std::pair<Text, Value>> items;
  std::unordered_map<std::string_view, size_t> index;  // key to index of its item

  Value* find(std::string_view key);
  void set(const Text& key, Value value);
};

// namespace(): the only object whose attributes a template may assign.
struct Namespace {
  Dict attributes;
};

// `loop` inside a for statement.
struct Loop {
  const std::vector<Value>* items;
  size_t index = 0, depth = 0;
  const Statement* recursive = nullptr;  // the statement that calling `loop` runs again, in `scope`
  Scope* scope = nullptr;
  List* seen = nullptr;  // the previous arguments of loop.changed()
};

// cycler('a', 'b') and joiner(', ').
struct Cycler {
  std::vector<Value> items;
  size_t at = 0;
};
struct Joiner {
  Text between;
  bool used = false;
};

// A method bound to its object: x.strip
struct Bound {
  const Builtin* method;
  Value self;
};

// A macro with the variables that it can see.
struct Closure {
  const Macro* macro;
  Scope* scope;
};

// Limits of a rendering. Steps bound its time; bytes bound the memory of all texts, lists and dicts ever
// created.
struct Limits {
  uint64_t steps = 16'000'000;
  uint64_t bytes = 128 << 20;
  uint64_t output = 32 << 20;
};

// How much stack parsing, running and printing may use in total. Threads of some systems have 512 KiB. We
// count bytes and not levels, because frame sizes differ between compilers and are several times as large
// with sanitizers. The rest is for the caller, and for code that does not check.
inline constexpr size_t kMostStack = 352 << 10;
// Whether the stack between `from` and here exceeds kMostStack.
bool stack_is_short(const char* from);

// Creates values and counts their memory as vectors and strings allocate it, including spare capacity.
class Heap {
 public:
  explicit Heap(const Limits& limits) : left_(limits) {}
  Heap(const Heap&) = delete;

  // Each fails with one sentence once its limit is reached.
  Status spend_steps(uint64_t count);
  Status spend_bytes(uint64_t count);
  Status spend_output(uint64_t count);

  // Fails if recursion has little of its stack left (see Recursion).
  Status check_stack() const;

  Result<Value> text(std::string_view text, bool markup = false);  // copies the text
  // Takes a text whose bytes are already counted
  Result<Value> keep(std::string text, bool markup = false);
  Result<Value> digits(std::string_view text);
  // Reserves room for so many more elements or bytes.
  template <typename Container>
  Status reserve(Container& in, uint64_t more) {
    const uint64_t room = in.capacity(), size = in.size();
    if (more <= room - size) return {};
    const uint64_t next = std::max(size + more, 2 * room);
    THIMBLE_TRY(spend_bytes(next * sizeof(in[0])));
    in.reserve(static_cast<size_t>(next));
    return {};
  }
  Result<List*> list(List::Kind kind = List::Kind::kList);
  Result<Dict*> dict();
  Result<Namespace*> new_namespace();
  Result<Loop*> loop(const Loop& like);
  Result<Value> cycler(std::vector<Value> items);
  Result<Value> joiner(const Text& between);
  Result<Value> bind(const Builtin* method, Value self);
  Result<Value> close(const Macro* macro, Scope* scope);
  Status append(List& to, Value value);
  Status set(Dict& in, const Text& key, Value value);

 private:
  friend class Recursion;

  Limits left_;
  const char* stack_ = nullptr;  // address of the outermost Recursion
  std::deque<List> lists_;
  std::deque<Dict> dicts_;
  std::deque<Namespace> namespaces_;
  std::deque<Loop> loops_;
  std::deque<Bound> bounds_;
  std::deque<Closure> closures_;
  std::deque<Cycler> cyclers_;
  std::deque<Joiner> joiners_;
};

// Marks the start of a recursion that Heap::check_stack() bounds. A nested one has no effect.
class Recursion {
 public:
  explicit Recursion(Heap& heap);
  ~Recursion();
  Recursion(const Recursion&) = delete;

 private:
  Heap& heap_;
  const char* const before_;
};

// A text that grows. Its memory is counted before it is allocated. Beyond the limit it stops growing, and
// status() and value() return the error.
class TextOut {
 public:
  explicit TextOut(Heap& heap) : heap_(heap) {}
  // Reserves so many more bytes, for callers that know how many will follow.
  void reserve(size_t more);
  void add(std::string_view text);
  void add(size_t count, std::string_view text);  // repeats the text `count` times
  TextOut& operator+=(std::string_view text) {
    add(text);
    return *this;
  }
  TextOut& operator+=(char c) {
    add({&c, 1});
    return *this;
  }
  TextOut another() const { return TextOut(heap_); }
  void fail(const Status& status) {
    if (status_.ok()) status_ = status;
  }
  const Status& status() const { return status_; }
  const std::string& text() const { return text_; }
  // Returns the text that was written and leaves this empty.
  Result<std::string> take();
  Result<Value> value(bool markup = false);

 private:
  Heap& heap_;
  std::string text_;
  Status status_;
};

inline constexpr uint32_t kDeepestValue = 64;  // nesting of lists when values are compared or written

template <typename T>
const T* as(const Value& value) {
  return std::get_if<T>(&value);
}
template <typename T>
bool is(const Value& value) {
  return std::holds_alternative<T>(value);
}
bool is_markup(const Value& value);
// The string of a text value, otherwise null.
const std::string* as_text(const Value& value);
// The integer of a value that counts as one, otherwise null. A boolean counts as 0 or 1.
const int64_t* as_integer(const Value& value, int64_t& room);

// A key in the form that dicts store, or null if the value cannot be a key; and the reverse.
Text as_key(const Value& value);
Value key_value(const Text& key);

Value make_text(std::string_view text);  // not counted: for constants and the caller's inputs

// The type's name in messages: "list", "undefined".
const char* kind_name(const Value& value);
bool truth(const Value& value);

// a == b. Comparing spends steps, so it can fail.
Result<bool> equal(Heap& heap, const Value& a, const Value& b);
// a < b for numbers, texts and lists of them. Other types have no order, which is an error.
Result<bool> less(Heap& heap, const Value& a, const Value& b);

// A value as it prints: None, True, ['a', 1]; texts without quotes.
Result<Text> printed(Heap& heap, const Value& value);

// The elements that a loop iterates over: elements, keys or characters; none for an undefined value. Consumes
// an iterator.
Result<List*> elements(Heap& heap, const Value& value);

}  // namespace thimble::jinja
