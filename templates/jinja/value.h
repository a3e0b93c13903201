// Values of a running template, as Python has them: none, booleans, integers, floats, texts, lists, dicts in
// the order of insertion, and things that can be called.
//
// Nothing changes a list or a dict once a template can see it. Namespaces are shared by reference and may
// hold themselves; that is why a Heap owns all these until the rendering ends, and a Value only points to
// them. Texts cannot hold anything and count their references.
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

// A missing variable, attribute or element; `name` says which, for messages, and belongs to the template.
struct Undefined {
  const std::string* name = nullptr;
};
struct None {};
struct Text : std::shared_ptr<const std::string> {
  using Base = std::shared_ptr<const std::string>;
  using Base::Base;
  Text(Base text, bool marked = false) : Base(std::move(text)), markup(marked) {}
  // HTML whose special characters are escaped (|safe, |escape): others that join it by + or % are escaped,
  // too.
  bool markup = false;
};

using Value = std::variant<Undefined, None, bool, int64_t, double, Text, List*, Dict*, Namespace*, Loop*,
                           Closure*, const Builtin*, Bound*, Cycler*, Joiner*>;

// What has elements in order: lists, and what differs from them in how it prints, what it equals, and what
// can be done with it.
struct List {
  // kKeys, kValues and kItems are what a dict's methods give. kIterator is what map() and its like give: its
  // elements are there once, and it has neither a length nor an end that could be asked for.
  enum class Kind : uint8_t { kList, kTuple, kRange, kKeys, kValues, kItems, kIterator };
  std::vector<Value> items;
  Kind kind = Kind::kList;
  Text shown;          // how a range prints
  bool group = false;  // of groupby: a tuple whose elements have names

  bool is_plain() const { return kind == Kind::kList || kind == Kind::kTuple; }
  bool has_places() const { return is_plain() || kind == Kind::kRange; }
};

// Keys are texts; an integer is kept as one that no text is likely to be (as_key, key_value).
struct Dict {
  std::vector<std::pair<Text, Value>> items;
  std::unordered_map<std::string_view, size_t> index;  // of a key's item

  Value* find(std::string_view key);
  void set(const Text& key, Value value);
};

// namespace(): the one thing whose attributes a template may assign.
struct Namespace {
  Dict attributes;
};

// What `loop` is within a for statement.
struct Loop {
  const std::vector<Value>* items;
  size_t index = 0, depth = 0;
  const Statement* recursive = nullptr;  // the statement that a call of `loop` runs again, in `scope`
  Scope* scope = nullptr;
  List* seen = nullptr;  // what loop.changed() was given before
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

// A method and what it is called on: x.strip
struct Bound {
  const Builtin* method;
  Value self;
};

// A macro and the variables that it sees.
struct Closure {
  const Macro* macro;
  Scope* scope;
};

// How much a rendering may use. Steps bound its time, bytes its memory: of all texts, lists and dicts ever
// made.
struct Limits {
  uint64_t steps = 16'000'000;
  uint64_t bytes = 128 << 20;
  uint64_t output = 32 << 20;
};

// How much of the stack parsing, running and printing may use, whatever they recurse through: threads of some
// systems have 512 KiB. Frames differ between compilers, and are several times as large with sanitizers, so
// bytes are counted and not levels. What is left is for the caller, and for what does not check.
inline constexpr size_t kMostStack = 352 << 10;
// Whether more than that lies between a place on the stack and here.
bool stack_is_short(const char* from);

// Makes values and counts what they take, as vectors and strings take it: with the room that they grow into.
class Heap {
 public:
  explicit Heap(const Limits& limits) : left_(limits) {}
  Heap(const Heap&) = delete;

  // Each refuses in one sentence when its limit is reached.
  Status spend_steps(uint64_t count);
  Status spend_bytes(uint64_t count);
  Status spend_output(uint64_t count);

  // Refuses where little is left of what recursion may use of the stack (Recursion).
  Status check_stack() const;

  Result<Value> text(std::string_view text, bool markup = false);  // a copy
  Result<Value> keep(std::string text, bool markup = false);       // whose bytes are counted already
  // Room for so many elements, or bytes, more.
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
  const char* stack_ = nullptr;  // where the outermost Recursion stands
  std::deque<List> lists_;
  std::deque<Dict> dicts_;
  std::deque<Namespace> namespaces_;
  std::deque<Loop> loops_;
  std::deque<Bound> bounds_;
  std::deque<Closure> closures_;
  std::deque<Cycler> cyclers_;
  std::deque<Joiner> joiners_;
};

// Stands where a recursion begins that Heap::check_stack() bounds; within another one it does nothing.
class Recursion {
 public:
  explicit Recursion(Heap& heap);
  ~Recursion();
  Recursion(const Recursion&) = delete;

 private:
  Heap& heap_;
  const char* const before_;
};

// A text that grows. What it takes is counted before it is taken; when that is too much it takes nothing
// more, and status() and value() refuse.
class TextOut {
 public:
  explicit TextOut(Heap& heap) : heap_(heap) {}
  // Takes room for so many bytes more, for who knows how many will come.
  void reserve(size_t more);
  void add(std::string_view text);
  void add(size_t count, std::string_view text);  // so many times
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
  // What was written; this is empty after it.
  Result<std::string> take();
  Result<Value> value(bool markup = false);

 private:
  Heap& heap_;
  std::string text_;
  Status status_;
};

inline constexpr uint32_t kDeepestValue = 64;  // lists within lists, where values are compared or written

template <typename T>
const T* as(const Value& value) {
  return std::get_if<T>(&value);
}
template <typename T>
bool is(const Value& value) {
  return std::holds_alternative<T>(value);
}
bool is_markup(const Value& value);
// The text of a value that is one, else null.
const std::string* as_text(const Value& value);
// A value that counts as a whole number: a boolean is 0 or 1.
const int64_t* as_integer(const Value& value, int64_t& room);

// A key as a dict keeps it, null where the value cannot be one; and the value again.
Text as_key(const Value& value);
Value key_value(const Text& key);

Value make_text(std::string_view text);  // not counted: for constants and what the caller gives

// "list", "undefined": what messages call it.
const char* kind_name(const Value& value);
bool truth(const Value& value);

// ==. A comparison costs steps, so that it can fail.
Result<bool> equal(Heap& heap, const Value& a, const Value& b);
// Less than, for numbers, texts and lists of them; others have no order.
Result<bool> less(Heap& heap, const Value& a, const Value& b);

// How a value prints: None, True, ['a', 1]. Texts as they are.
Result<Text> printed(Heap& heap, const Value& value);

// What a loop goes through: elements, keys, characters; nothing of an undefined value. Takes them from an
// iterator.
Result<List*> elements(Heap& heap, const Value& value);

}  // namespace thimble::jinja
