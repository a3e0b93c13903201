// Methods of texts, lists and dicts, as in Python.
#include <algorithm>
#include <array>
#include <span>

#include "templates/jinja/format.h"
#include "templates/jinja/letters.h"
#include "templates/jinja/machine.h"
#include "templates/jinja/table.h"
#include "templates/jinja/text.h"

namespace thimble::jinja {
namespace {

Status bad(const std::string& what) { return error(Code::kInvalidArgument, "%s", what.c_str()); }

const std::string& self_text(const Call& c) { return *as_text(c.self); }
List& self_list(const Call& c) { return **as<List*>(c.self); }
Dict& self_dict(const Call& c) { return **as<Dict*>(c.self); }

// Spends the steps that searching `part` in `whole` may cost.
Status spend_search(Heap& heap, size_t whole, size_t part) {
  return heap.spend_steps(whole * (part + 1) / 64);
}

// ---- texts ----

template <bool at_start, bool at_end>
Result<Value> strip(Call& c) {
  std::string_view text = self_text(c);
  const std::string* set = nullptr;
  if (c.given(0) && !is<None>(c.arguments[0])) {
    THIMBLE_LET(given, c.text(0));
    set = as_text(c.arguments[0]);
    THIMBLE_TRY(spend_search(c.heap, text.size(), given->size()));
  }
  if (at_start) text = strip_start(text, set);
  if (at_end) text = strip_end(text, set);
  return c.made(text);
}

template <void (*changed)(std::string_view, TextOut&)>
Result<Value> change(Call& c) {
  TextOut out(c.heap);
  changed(self_text(c), out);
  return out.value(is_markup(c.self));
}

// The part of the text between arguments `i` and `i` + 1, counted in characters as in a slice, and its byte
// offset. None if it starts after the end of the text.
struct Part {
  std::string_view text;
  size_t offset = 0, first = 0;
  bool there = true;
};
Result<Part> bounded(Call& c, size_t i) {
  Part part{self_text(c)};
  if (!c.given(i) && !c.given(i + 1)) return part;
  THIMBLE_TRY(c.heap.spend_steps(part.text.size() / 16));
  const auto size = static_cast<int64_t>(character_count(part.text));
  const auto bound = [&](size_t at, int64_t otherwise) -> Result<int64_t> {
    if (!c.given(at) || is<None>(c.arguments[at])) return otherwise;
    THIMBLE_LET(place, c.integer(at, 0));
    return place < 0 ? std::max<int64_t>(place + size, 0) : place;
  };
  THIMBLE_LET(first, bound(i, 0));
  THIMBLE_LET(last, bound(i + 1, size));
  if (first > size || first > last) {
    part.there = false;
    return part;
  }
  part.first = static_cast<size_t>(first);
  part.text = characters(self_text(c), part.first, static_cast<size_t>(std::min(last, size)));
  part.offset = static_cast<size_t>(characters(self_text(c), 0, part.first).size());
  return part;
}

// Whether the text starts, or ends, with a text or with one of a tuple.
template <bool at_start>
Result<Value> has_edge(Call& c) {
  THIMBLE_TRY(need_defined(c.arguments[0]));
  THIMBLE_LET(part, bounded(c, 1));
  std::span<const Value> edges(c.arguments.data(), 1);
  if (List* const* several = as<List*>(c.arguments[0]); several && (*several)->kind == List::Kind::kTuple)
    edges = (*several)->items;
  for (const Value& edge : edges) {
    const std::string* text = as_text(edge);
    if (!text) return bad("startswith and endswith compare with a text, or a tuple of them");
    THIMBLE_TRY(c.heap.spend_steps(1 + text->size() / 64));
    if (part.there && (at_start ? part.text.starts_with(*text) : part.text.ends_with(*text)))
      return Value(true);
  }
  return Value(false);
}

// Adds a piece of the text to a list.
Status append_piece(Call& c, List& to, std::string_view piece) {
  THIMBLE_LET(text, c.made(piece));
  return c.heap.append(to, text);
}

// Splits at white space; white space at the ends separates nothing. `backwards`: from the end.
Status split_at_space(Call& c, List& to, int64_t most, bool backwards) {
  std::string_view rest = self_text(c);
  const auto strip = [&] { return backwards ? strip_end(rest, nullptr) : strip_start(rest, nullptr); };
  for (rest = strip(); !rest.empty(); rest = strip()) {
    if (most >= 0 && static_cast<int64_t>(to.items.size()) == most) return append_piece(c, to, rest);
    size_t size = 0;
    if (backwards)
      while (size < rest.size() && !space_at_end(rest.substr(0, rest.size() - size)))
        size += last_character(rest.substr(0, rest.size() - size)).size();
    else
      while (size < rest.size() && !space_at_start(rest.substr(size))) ++size;
    THIMBLE_TRY(append_piece(c, to, backwards ? rest.substr(rest.size() - size) : rest.substr(0, size)));
    rest = backwards ? rest.substr(0, rest.size() - size) : rest.substr(size);
  }
  return {};
}

Status split_at(Call& c, List& to, std::string_view between, int64_t most, bool backwards) {
  std::string_view rest = self_text(c);
  for (size_t at; (most < 0 || static_cast<int64_t>(to.items.size()) < most) &&
                  (at = backwards ? rest.rfind(between) : rest.find(between)) != std::string_view::npos;) {
    const std::string_view before = rest.substr(0, at), after = rest.substr(at + between.size());
    THIMBLE_TRY(append_piece(c, to, backwards ? after : before));
    rest = backwards ? before : after;
  }
  return append_piece(c, to, rest);
}

template <bool backwards>
Result<Value> split(Call& c) {
  THIMBLE_LET(most, c.integer(1, -1));
  THIMBLE_LET(all, c.heap.list());
  if (!c.given(0) || is<None>(c.arguments[0])) {
    THIMBLE_TRY(split_at_space(c, *all, most, backwards));
  } else {
    THIMBLE_LET(between, c.text(0));
    if (between->empty()) return bad("a text cannot be split at an empty one");
    THIMBLE_TRY(spend_search(c.heap, self_text(c).size(), between->size()));
    THIMBLE_TRY(split_at(c, *all, *between, most, backwards));
  }
  if (backwards) std::reverse(all->items.begin(), all->items.end());
  return Value(all);
}

Result<Value> splitlines(Call& c) {
  THIMBLE_LET(all, c.heap.list());
  for (std::string_view rest = self_text(c); !rest.empty();) {
    const std::string_view from = rest;
    std::string_view line = take_line(rest);
    if (c.flag(0)) line = from.substr(0, from.size() - rest.size());  // keep the line ending
    THIMBLE_TRY(append_piece(c, *all, line));
  }
  return Value(all);
}

Result<Value> replace(Call& c) {
  THIMBLE_LET(old, c.text(0));
  THIMBLE_LET(given, c.text(1));
  THIMBLE_LET(with, is_markup(c.self) ? escaped(c.heap, Value(given)) : Result<Text>(given));
  THIMBLE_LET(most, c.integer(2, -1));
  std::string_view rest = self_text(c);
  THIMBLE_TRY(spend_search(c.heap, rest.size(), old->size()));
  TextOut out(c.heap);
  for (int64_t done = 0; most < 0 || done < most; ++done) {
    size_t at = rest.find(*old);
    // The empty text is found before every character, and once at the end.
    if (old->empty() && done > 0) {
      std::string_view after = rest;
      at = rest.empty() ? std::string_view::npos : take_character(after).size();
    }
    if (at == std::string_view::npos) break;
    out += rest.substr(0, at);
    out += *with;
    THIMBLE_TRY(out.status());
    rest.remove_prefix(at + old->size());
  }
  out += rest;
  return out.value(is_markup(c.self));
}

// The index of a part in characters, or -1. `last`: the last one. `needed`: an error instead of -1.
template <bool last, bool needed = false>
Result<Value> find(Call& c) {
  THIMBLE_LET(what, c.text(0));
  THIMBLE_LET(part, bounded(c, 1));
  THIMBLE_TRY(spend_search(c.heap, part.text.size(), what->size()));
  const size_t at = !part.there ? std::string::npos : last ? part.text.rfind(*what) : part.text.find(*what);
  if (at == std::string::npos && needed) return bad("index looks for a text that is not there");
  if (at == std::string::npos) return Value(int64_t{-1});
  return Value(static_cast<int64_t>(part.first + character_count(part.text.substr(0, at))));
}

Result<Value> count(Call& c) {
  THIMBLE_LET(what, c.text(0));
  THIMBLE_LET(part, bounded(c, 1));
  THIMBLE_TRY(spend_search(c.heap, part.text.size(), what->size()));
  if (!part.there) return Value(int64_t{0});
  if (what->empty()) return Value(static_cast<int64_t>(character_count(part.text)) + 1);
  int64_t found = 0;
  for (size_t at = 0; (at = part.text.find(*what, at)) != std::string_view::npos; at += what->size()) ++found;
  return Value(found);
}

Result<Value> join(Call& c) {
  THIMBLE_LET(all, elements(c.heap, c.arguments[0]));
  TextOut out(c.heap);
  for (size_t i = 0; i < all->items.size(); ++i) {
    if (!is<Text>(all->items[i]))
      return bad(std::string("only texts can be joined, and one is ") + kind_name(all->items[i]));
    THIMBLE_LET(text, is_markup(c.self) ? escaped(c.heap, all->items[i]) : printed(c.heap, all->items[i]));
    if (i) out += self_text(c);
    out += *text;
    THIMBLE_TRY(out.status());
  }
  return out.value(is_markup(c.self));
}

Result<Value> format(Call& c) { return brace_format(c, *as<Text>(c.self)); }

template <bool at_start>
Result<Value> remove_edge(Call& c) {
  THIMBLE_LET(edge, c.text(0));
  std::string_view text = self_text(c);
  if (at_start && text.starts_with(*edge)) text.remove_prefix(edge->size());
  if (!at_start && text.ends_with(*edge)) text.remove_suffix(edge->size());
  return c.made(text);
}

template <bool (*holds)(std::string_view)>
Result<Value> is_made_of(Call& c) {
  THIMBLE_TRY(c.heap.spend_steps(self_text(c).size() / 16));
  return Value(holds(self_text(c)));
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0x80; });
}

bool is_identifier(std::string_view text) {
  if (text.empty() || (text[0] >= '0' && text[0] <= '9')) return false;
  return std::all_of(text.begin(), text.end(), [](char c) {
    return c == '_' || static_cast<uint8_t>(c) >= 0x80 || is_letters_and_numbers({&c, 1});
  });
}

// Pads to a width with spaces or another character: on the left, on the right, or on both sides.
enum class Side { kBefore, kBehind, kBoth };
template <Side side>
Result<Value> pad(Call& c) {
  const std::string& text = self_text(c);
  THIMBLE_LET(width, c.integer(0, 0));
  std::string fill = " ";
  if (c.given(1)) {
    THIMBLE_LET(given, c.text(1));
    fill = *given;
  }
  if (character_count(fill) != 1) return bad("a text is padded with exactly one character");
  THIMBLE_TRY(c.heap.spend_steps(text.size() / 16));
  const auto size = static_cast<int64_t>(character_count(text));
  if (width <= size) return c.self;
  const auto room = static_cast<uint64_t>(width - size);
  const uint64_t before = side == Side::kBefore ? room
                          : side == Side::kBoth ? room / 2 + (room & static_cast<uint64_t>(width) & 1)
                                                : 0;
  TextOut out(c.heap);
  out.add(before, fill);
  out += text;
  out.add(room - before, fill);
  return out.value(is_markup(c.self));
}

Result<Value> zfill(Call& c) {
  THIMBLE_LET(width, c.integer(0, 0));
  const std::string& text = self_text(c);
  THIMBLE_TRY(c.heap.spend_steps(text.size() / 16));
  const auto size = static_cast<int64_t>(character_count(text));
  if (width <= size) return c.self;
  const size_t sign = !text.empty() && (text[0] == '-' || text[0] == '+');
  const std::string_view whole = text;
  TextOut out(c.heap);
  out += whole.substr(0, sign);
  out.add(static_cast<size_t>(width - size), "0");
  out += whole.substr(sign);
  return out.value(is_markup(c.self));
}

Result<Value> expandtabs(Call& c) {
  THIMBLE_LET(width, c.integer(0, 8));
  TextOut out(c.heap);
  int64_t column = 0;
  for (std::string_view rest = self_text(c); !rest.empty() && out.status().ok();) {
    const std::string_view character = take_character(rest);
    const bool ends = character == "\n" || character == "\r";
    if (character == "\t") {
      const int64_t gap = width > 0 ? width - column % width : 0;
      out.add(static_cast<size_t>(gap), " ");
      column += gap;
      continue;
    }
    out += character;
    column = ends ? 0 : column + 1;
  }
  return out.value(is_markup(c.self));
}

// Splits at the first place of a text, or at the last one: the text before it, itself, and the text after it.
template <bool last>
Result<Value> partition(Call& c) {
  THIMBLE_LET(between, c.text(0));
  if (between->empty()) return bad("a text cannot be partitioned at an empty one");
  const std::string_view text = self_text(c);
  THIMBLE_TRY(spend_search(c.heap, text.size(), between->size()));
  const size_t at = last ? text.rfind(*between) : text.find(*between);
  const bool found = at != std::string::npos;
  std::array<std::string_view, 3> parts = {text, "", ""};
  if (found) parts = {text.substr(0, at), *between, text.substr(at + between->size())};
  if (!found && last) parts = {"", "", text};
  THIMBLE_LET(all, c.heap.list(List::Kind::kTuple));
  for (const std::string_view part : parts) THIMBLE_TRY(append_piece(c, *all, part));
  return Value(all);
}

constexpr Builtin kTextMethods[] = {
    {"capitalize", "", change<capitalized>},
    {"casefold", "", change<folded>},
    {"center", "width ?fillchar", pad<Side::kBoth>},
    {"count", "sub ?start ?end", count},
    {"endswith", "suffix ?start ?end", has_edge<false>},
    {"expandtabs", "?tabsize", expandtabs},
    {"find", "sub ?start ?end", find<false>},
    {"format", "* **", format},
    {"index", "sub ?start ?end", find<false, true>},
    {"isalnum", "", is_made_of<is_letters_and_numbers>},
    {"isalpha", "", is_made_of<is_letters>},
    {"isascii", "", is_made_of<is_ascii>},
    {"isdecimal", "", is_made_of<is_decimals>},
    {"isdigit", "", is_made_of<is_digits>},
    {"isidentifier", "", is_made_of<is_identifier>},
    {"islower", "", is_made_of<is_lower>},
    {"isnumeric", "", is_made_of<is_numbers>},
    {"isspace", "", is_made_of<is_spaces>},
    {"istitle", "", is_made_of<is_titled>},
    {"isupper", "", is_made_of<is_upper>},
    {"join", "iterable", join},
    {"ljust", "width ?fillchar", pad<Side::kBehind>},
    {"lower", "", change<lower>},
    {"lstrip", "?chars", strip<true, false>},
    {"partition", "sep", partition<false>},
    {"removeprefix", "prefix", remove_edge<true>},
    {"removesuffix", "suffix", remove_edge<false>},
    {"replace", "old new ?count", replace},
    {"rfind", "sub ?start ?end", find<true>},
    {"rindex", "sub ?start ?end", find<true, true>},
    {"rjust", "width ?fillchar", pad<Side::kBefore>},
    {"rpartition", "sep", partition<true>},
    {"rsplit", "?sep ?maxsplit", split<true>},
    {"rstrip", "?chars", strip<false, true>},
    {"split", "?sep ?maxsplit", split<false>},
    {"splitlines", "?keepends", splitlines},
    {"startswith", "prefix ?start ?end", has_edge<true>},
    {"strip", "?chars", strip<true, true>},
    {"swapcase", "", change<swapped>},
    {"title", "", change<titled>},
    {"upper", "", change<upper>},
    {"zfill", "width", zfill},
};

// ---- lists ----

Result<Value> index(Call& c) {
  const std::vector<Value>& items = self_list(c).items;
  for (size_t i = 0; i < items.size(); ++i) {
    THIMBLE_LET(same, equal(c.heap, items[i], c.arguments[0]));
    if (same) return Value(static_cast<int64_t>(i));
  }
  return bad("index looks for a value that is not in the list");
}

Result<Value> count_equal(Call& c) {
  int64_t found = 0;
  for (const Value& item : self_list(c).items) {
    THIMBLE_LET(same, equal(c.heap, item, c.arguments[0]));
    found += same;
  }
  return Value(found);
}

// Some published templates collect values in a list, so these methods may change lists. transformers refuses
// them.
Result<Value> append(Call& c) {
  THIMBLE_TRY(c.heap.append(self_list(c), c.arguments[0]));
  return Value(None());
}

Result<Value> extend(Call& c) {
  THIMBLE_LET(more, elements(c.heap, c.arguments[0]));
  const size_t size = more->items.size();  // both may be the same list
  for (size_t i = 0; i < size; ++i) {
    const Value item = more->items[i];
    THIMBLE_TRY(c.heap.append(self_list(c), item));
  }
  return Value(None());
}

Result<Value> insert(Call& c) {
  THIMBLE_LET(place, c.integer(0, 0));
  std::vector<Value>& items = self_list(c).items;
  const auto size = static_cast<int64_t>(items.size());
  THIMBLE_TRY(c.heap.spend_steps(items.size() / 8));
  THIMBLE_TRY(c.heap.reserve(items, 1));
  const int64_t at = std::clamp<int64_t>(place < 0 ? place + size : place, 0, size);
  items.insert(items.begin() + at, c.arguments[1]);
  return Value(None());
}

Result<Value> pop(Call& c) {
  THIMBLE_LET(place, c.integer(0, -1));
  std::vector<Value>& items = self_list(c).items;
  const auto size = static_cast<int64_t>(items.size());
  const int64_t at = place < 0 ? place + size : place;
  if (at < 0 || at >= size) return bad("pop needs an index that is in the list");
  THIMBLE_TRY(c.heap.spend_steps(items.size() / 8));
  const Value taken = items[static_cast<size_t>(at)];
  items.erase(items.begin() + at);
  return taken;
}

Result<Value> copy_list(Call& c) { return c.machine.call_filter("list", c.self, {}); }

constexpr Builtin kPlaceMethods[] = {{"count", "value", count_equal}, {"index", "value", index}};
constexpr Builtin kListMethods[] = {
    {"append", "object", append},       {"copy", "", copy_list}, {"extend", "iterable", extend},
    {"insert", "index object", insert}, {"pop", "?index", pop},
};

// ---- dicts ----

Result<Value> get(Call& c) {
  if (c.rest.size() > 1) return bad("get has too many arguments");
  THIMBLE_TRY(need_hashable(c.arguments[0]));
  const Text key = as_key(c.arguments[0]);
  if (const Value* value = key ? self_dict(c).find(*key) : nullptr) return *value;
  return c.rest.empty() ? Value(None()) : c.rest[0];  // may be undefined
}

template <List::Kind kind>
Result<Value> view(Call& c) {
  THIMBLE_LET(all, c.heap.list(kind));
  for (const auto& [key, value] : self_dict(c).items) {
    if (kind == List::Kind::kItems) {
      THIMBLE_LET(both, c.heap.list(List::Kind::kTuple));
      THIMBLE_TRY(c.heap.append(*both, key_value(key)));
      THIMBLE_TRY(c.heap.append(*both, value));
      THIMBLE_TRY(c.heap.append(*all, both));
    } else {
      THIMBLE_TRY(c.heap.append(*all, kind == List::Kind::kKeys ? key_value(key) : value));
    }
  }
  return Value(all);
}

Result<Value> copy(Call& c) {
  THIMBLE_LET(made, c.heap.dict());
  for (const auto& [key, value] : self_dict(c).items) THIMBLE_TRY(c.heap.set(*made, key, value));
  return Value(made);
}

constexpr Builtin kDictMethods[] = {
    {"copy", "", copy},
    {"get", "key *", get},
    {"items", "", view<List::Kind::kItems>},
    {"keys", "", view<List::Kind::kKeys>},
    {"values", "", view<List::Kind::kValues>},
};

// ---- loop, cycler ----

// loop.cycle('odd', 'even')
Result<Value> cycle(Call& c) {
  if (c.rest.empty()) return bad("cycle needs at least one value");
  return c.rest[(*as<Loop*>(c.self))->index % c.rest.size()];
}

// Whether these values differ from those of the previous call.
Result<Value> changed(Call& c) {
  Loop& loop = **as<Loop*>(c.self);
  THIMBLE_LET(now, c.heap.list(List::Kind::kTuple));
  for (const Value& value : c.rest) THIMBLE_TRY(c.heap.append(*now, value));
  List* const before = std::exchange(loop.seen, now);
  if (!before) return Value(true);
  THIMBLE_LET(same, equal(c.heap, before, now));
  return Value(!same);
}

constexpr Builtin kLoopMethods[] = {{"changed", "*", changed}, {"cycle", "*", cycle}};

Result<Value> next(Call& c) {
  Cycler& cycler = **as<Cycler*>(c.self);
  const Value now = cycler.items[cycler.at];
  cycler.at = (cycler.at + 1) % cycler.items.size();
  return now;
}

Result<Value> reset(Call& c) {
  (*as<Cycler*>(c.self))->at = 0;
  return Value(None());
}

constexpr Builtin kCyclerMethods[] = {{"next", "", next}, {"reset", "", reset}};

}  // namespace

const Builtin* find_method(const Value& self, std::string_view name) {
  if (is<Text>(self)) return find_in(kTextMethods, name);
  if (List* const* list = as<List*>(self)) {
    if ((*list)->has_places())
      if (const Builtin* found = find_in(kPlaceMethods, name)) return found;
    return (*list)->kind == List::Kind::kList ? find_in(kListMethods, name) : nullptr;
  }
  if (is<Dict*>(self)) return find_in(kDictMethods, name);
  if (is<Cycler*>(self)) return find_in(kCyclerMethods, name);
  return is<Loop*>(self) ? find_in(kLoopMethods, name) : nullptr;
}

bool changes(const Value& self, std::string_view name) {
  const auto among = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is<Dict*>(self)) return among({"clear", "pop", "popitem", "setdefault", "update"});
  List* const* list = as<List*>(self);
  return list && (*list)->kind == List::Kind::kList && among({"clear", "remove", "reverse", "sort"});
}

}  // namespace thimble::jinja
