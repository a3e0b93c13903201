// Methods of texts, lists and dicts, as Python has them.
#include <algorithm>

#include "runtime/jinja/machine.h"
#include "runtime/jinja/table.h"
#include "runtime/jinja/text.h"

namespace thimble::jinja {
namespace {

Status bad(const std::string& what) { return error(Code::kInvalidArgument, "%s", what.c_str()); }

const std::string& self_text(const Call& c) { return *as_text(c.self); }
List& self_list(const Call& c) { return **as<List*>(c.self); }
Dict& self_dict(const Call& c) { return **as<Dict*>(c.self); }

// What looking for `part` in `whole` may cost.
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
  return c.heap.text(std::string(text));
}

template <std::string (*changed)(std::string_view)>
Result<Value> change(Call& c) {
  return c.heap.text(changed(self_text(c)));
}

// Whether it starts, or ends, with a text or one of a tuple.
template <bool at_start>
Result<Value> has_edge(Call& c) {
  THIMBLE_TRY(need_defined(c.arguments[0]));
  std::vector<Value> edges = {c.arguments[0]};
  if (List* const* several = as<List*>(c.arguments[0])) edges = (*several)->items;
  for (const Value& edge : edges) {
    const std::string* text = as_text(edge);
    if (!text) return bad("startswith and endswith compare with a text");
    THIMBLE_TRY(c.heap.spend_steps(1 + text->size() / 64));
    if (at_start ? self_text(c).starts_with(*text) : self_text(c).ends_with(*text)) return Value(true);
  }
  return Value(false);
}

Result<Value> append_pieces(Call& c, const std::vector<std::string_view>& pieces) {
  THIMBLE_LET(all, c.heap.list());
  for (const std::string_view piece : pieces) {
    THIMBLE_LET(text, c.heap.text(std::string(piece)));
    THIMBLE_TRY(c.heap.append(*all, text));
  }
  return Value(all);
}

// At white space, which is nothing where it stands at the ends.
std::vector<std::string_view> split_at_space(std::string_view rest, int64_t most) {
  std::vector<std::string_view> pieces;
  for (rest = strip_start(rest, nullptr); !rest.empty(); rest = strip_start(rest, nullptr)) {
    if (most >= 0 && static_cast<int64_t>(pieces.size()) == most) {
      pieces.push_back(rest);
      break;
    }
    size_t size = 0;
    while (size < rest.size() && !space_at_start(rest.substr(size))) ++size;
    pieces.push_back(rest.substr(0, size));
    rest.remove_prefix(size);
  }
  return pieces;
}

Result<Value> split(Call& c) {
  std::string_view rest = self_text(c);
  THIMBLE_LET(most, c.integer(1, -1));
  THIMBLE_TRY(c.heap.spend_bytes(rest.size()));
  if (!c.given(0) || is<None>(c.arguments[0])) return append_pieces(c, split_at_space(rest, most));
  THIMBLE_LET(between, c.text(0));
  if (between->empty()) return bad("a text cannot be split at an empty one");
  THIMBLE_TRY(spend_search(c.heap, rest.size(), between->size()));
  std::vector<std::string_view> pieces;
  for (size_t at; (most < 0 || static_cast<int64_t>(pieces.size()) < most) &&
                  (at = rest.find(*between)) != std::string_view::npos;) {
    pieces.push_back(rest.substr(0, at));
    rest.remove_prefix(at + between->size());
  }
  pieces.push_back(rest);
  return append_pieces(c, pieces);
}

Result<Value> rsplit(Call& c) {
  std::string_view rest = self_text(c);
  THIMBLE_LET(between, c.text(0));
  THIMBLE_LET(most, c.integer(1, -1));
  if (between->empty()) return bad("a text cannot be split at an empty one");
  THIMBLE_TRY(c.heap.spend_bytes(rest.size()));
  THIMBLE_TRY(spend_search(c.heap, rest.size(), between->size()));
  std::vector<std::string_view> pieces;
  for (size_t at; (most < 0 || static_cast<int64_t>(pieces.size()) < most) &&
                  (at = rest.rfind(*between)) != std::string_view::npos;) {
    pieces.push_back(rest.substr(at + between->size()));
    rest = rest.substr(0, at);
  }
  pieces.push_back(rest);
  std::reverse(pieces.begin(), pieces.end());
  return append_pieces(c, pieces);
}

Result<Value> splitlines(Call& c) {
  THIMBLE_TRY(c.heap.spend_bytes(self_text(c).size()));
  return append_pieces(c, split_lines(self_text(c)));
}

Result<Value> replace(Call& c) {
  THIMBLE_LET(old, c.text(0));
  THIMBLE_LET(with, c.text(1));
  THIMBLE_LET(most, c.integer(2, -1));
  std::string_view rest = self_text(c);
  THIMBLE_TRY(spend_search(c.heap, rest.size(), old->size()));
  std::string out;
  for (int64_t done = 0; most < 0 || done < most; ++done) {
    size_t at = rest.find(*old);
    // Nothing is found before every character, and once at the end.
    if (old->empty() && done > 0)
      at = rest.empty() ? std::string_view::npos : split_characters(rest.substr(0, 4))[0].size();
    if (at == std::string_view::npos) break;
    THIMBLE_TRY(c.heap.spend_bytes(at + with->size()));
    out += rest.substr(0, at);
    out += *with;
    rest.remove_prefix(at + old->size());
  }
  return c.heap.text(out + std::string(rest));
}

// The place of a part in characters, or -1; from the end where `last`.
template <bool last>
Result<Value> find(Call& c) {
  THIMBLE_LET(part, c.text(0));
  THIMBLE_TRY(spend_search(c.heap, self_text(c).size(), part->size()));
  const size_t at = last ? self_text(c).rfind(*part) : self_text(c).find(*part);
  if (at == std::string::npos) return Value(int64_t{-1});
  return Value(static_cast<int64_t>(character_count(std::string_view(self_text(c)).substr(0, at))));
}

Result<Value> count(Call& c) {
  THIMBLE_LET(part, c.text(0));
  THIMBLE_TRY(spend_search(c.heap, self_text(c).size(), part->size()));
  if (part->empty()) return Value(static_cast<int64_t>(character_count(self_text(c))) + 1);
  int64_t found = 0;
  for (size_t at = 0; (at = self_text(c).find(*part, at)) != std::string::npos; at += part->size()) ++found;
  return Value(found);
}

Result<Value> join(Call& c) {
  THIMBLE_LET(all, elements(c.heap, c.arguments[0]));
  std::string out;
  for (size_t i = 0; i < all->items.size(); ++i) {
    const std::string* text = as_text(all->items[i]);
    if (!text) return bad(std::string("only texts can be joined, and one is ") + kind_name(all->items[i]));
    THIMBLE_TRY(c.heap.spend_bytes(text->size() + self_text(c).size()));
    out += (i ? self_text(c) : "") + *text;
  }
  return c.heap.text(std::move(out));
}

// The value that {}, {0} or {name} stands for.
Result<Value> field(Call& c, std::string_view name, size_t& next) {
  size_t index = next;
  if (name.empty()) {
    ++next;
  } else if (std::all_of(name.begin(), name.end(), [](char d) { return d >= '0' && d <= '9'; }) &&
             name.size() < 4) {
    index = static_cast<size_t>(std::stoul(std::string(name)));
  } else {
    for (const auto& [key, value] : c.keywords)
      if (*key == name) return value;
    return bad("format does not know the field '" + std::string(name.substr(0, 64)) + "'");
  }
  if (index < c.rest.size()) return c.rest[index];
  return bad("format has fewer arguments than fields");
}

Result<Value> format(Call& c) {
  std::string out;
  std::string_view rest = self_text(c);
  for (size_t next = 0; !rest.empty();) {
    const size_t at = std::min(rest.find_first_of("{}"), rest.size());
    out += rest.substr(0, at);
    rest.remove_prefix(at);
    if (rest.empty()) break;
    if (rest.substr(0, 2) == "{{" || rest.substr(0, 2) == "}}") {
      out += rest[0];
      rest.remove_prefix(2);
      continue;
    }
    const size_t end = rest.find('}');
    if (rest[0] == '}' || end == std::string_view::npos) return bad("a brace of format has no other");
    THIMBLE_LET(value, field(c, rest.substr(1, end - 1), next));
    THIMBLE_LET(text, printed(c.heap, value));
    THIMBLE_TRY(c.heap.spend_bytes(text->size()));
    out += *text;
    rest.remove_prefix(end + 1);
  }
  return c.heap.text(std::move(out));
}

template <bool at_start>
Result<Value> remove_edge(Call& c) {
  THIMBLE_LET(edge, c.text(0));
  std::string_view text = self_text(c);
  if (at_start && text.starts_with(*edge)) text.remove_prefix(edge->size());
  if (!at_start && text.ends_with(*edge)) text.remove_suffix(edge->size());
  return c.heap.text(std::string(text));
}

template <bool (*fits)(char)>
Result<Value> is_made_of(Call& c) {
  const std::string& text = self_text(c);
  THIMBLE_TRY(c.heap.spend_steps(text.size() / 64));
  return Value(!text.empty() && std::all_of(text.begin(), text.end(), fits));
}
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

constexpr Builtin kTextMethods[] = {
    {"capitalize", "", change<capitalized>},
    {"count", "sub", count},
    {"endswith", "suffix", has_edge<false>},
    {"find", "sub", find<false>},
    {"format", "* **", format},
    {"isalpha", "", is_made_of<is_letter>},
    {"isdigit", "", is_made_of<is_digit>},
    {"join", "iterable", join},
    {"lower", "", change<lower>},
    {"lstrip", "?chars", strip<true, false>},
    {"removeprefix", "prefix", remove_edge<true>},
    {"removesuffix", "suffix", remove_edge<false>},
    {"replace", "old new ?count", replace},
    {"rfind", "sub", find<true>},
    {"rsplit", "sep ?maxsplit", rsplit},
    {"rstrip", "?chars", strip<false, true>},
    {"split", "?sep ?maxsplit", split},
    {"splitlines", "", splitlines},
    {"startswith", "prefix", has_edge<true>},
    {"strip", "?chars", strip<true, true>},
    {"upper", "", change<upper>},
};

// ---- lists ----

Status need_no_tuple(const Call& c) {
  return self_list(c).tuple ? bad("a tuple cannot be changed") : Status();
}

Result<Value> append(Call& c) {
  THIMBLE_TRY(need_no_tuple(c));
  THIMBLE_TRY(c.heap.append(self_list(c), c.arguments[0]));
  return Value(None());
}

Result<Value> extend(Call& c) {
  THIMBLE_TRY(need_no_tuple(c));
  THIMBLE_LET(more, elements(c.heap, c.arguments[0]));
  const std::vector<Value> items = more->items;  // which may be the list itself
  for (const Value& item : items) THIMBLE_TRY(c.heap.append(self_list(c), item));
  return Value(None());
}

Result<Value> insert(Call& c) {
  THIMBLE_TRY(need_no_tuple(c));
  THIMBLE_LET(place, c.integer(0, 0));
  std::vector<Value>& items = self_list(c).items;
  const auto size = static_cast<int64_t>(items.size());
  THIMBLE_TRY(c.heap.spend_steps(items.size() / 8));
  THIMBLE_TRY(c.heap.spend_bytes(sizeof(Value)));
  const int64_t at = std::clamp<int64_t>(place < 0 ? place + size : place, 0, size);
  items.insert(items.begin() + at, c.arguments[1]);
  return Value(None());
}

Result<Value> pop(Call& c) {
  THIMBLE_TRY(need_no_tuple(c));
  THIMBLE_LET(place, c.integer(0, -1));
  std::vector<Value>& items = self_list(c).items;
  const auto size = static_cast<int64_t>(items.size());
  const int64_t at = place < 0 ? place + size : place;
  if (at < 0 || at >= size) return bad("pop takes from a list what is not there");
  THIMBLE_TRY(c.heap.spend_steps(items.size() / 8));
  const Value taken = items[static_cast<size_t>(at)];
  items.erase(items.begin() + at);
  return taken;
}

Result<Value> index(Call& c) {
  const std::vector<Value>& items = self_list(c).items;
  for (size_t i = 0; i < items.size(); ++i) {
    THIMBLE_LET(same, equal(c.heap, items[i], c.arguments[0]));
    if (same) return Value(static_cast<int64_t>(i));
  }
  return bad("index looks for a value that is not in the list");
}

constexpr Builtin kListMethods[] = {
    {"append", "object", append},       {"extend", "iterable", extend}, {"index", "value", index},
    {"insert", "index object", insert}, {"pop", "?index", pop},
};

// ---- dicts ----

// What the key stands for, or null.
const Value* find_key(const Call& c) {
  const Text key = as_key(c.arguments[0]);
  return key ? self_dict(c).find(*key) : nullptr;
}

Result<Value> get(Call& c) {
  if (const Value* value = find_key(c)) return *value;
  return c.given(1) ? c.arguments[1] : Value(None());
}

Result<Value> items(Call& c) { return c.machine.call_filter("items", c.self, {}); }
Result<Value> keys(Call& c) { return c.machine.call_filter("list", c.self, {}); }

Result<Value> values(Call& c) {
  THIMBLE_LET(all, c.heap.list());
  for (const auto& [key, value] : self_dict(c).items) THIMBLE_TRY(c.heap.append(*all, value));
  return Value(all);
}

Result<Value> pop_key(Call& c) {
  const Value* value = find_key(c);
  if (!value && !c.given(1)) return bad("pop takes from a dict a key that is not there");
  if (!value) return c.arguments[1];
  const Value taken = *value;
  THIMBLE_TRY(c.heap.spend_steps(self_dict(c).items.size()));
  self_dict(c).erase(*as_key(c.arguments[0]));
  return taken;
}

Result<Value> update(Call& c) {
  if (Dict* const* more = as<Dict*>(c.arguments[0])) {
    const auto entries = (*more)->items;  // which may be the dict itself
    for (const auto& [key, value] : entries) THIMBLE_TRY(c.heap.set(self_dict(c), key, value));
  } else if (c.given(0)) {
    return bad(std::string("update takes a dict, and ") + kind_name(c.arguments[0]) + " was given");
  }
  for (const auto& [key, value] : c.keywords) THIMBLE_TRY(c.heap.set(self_dict(c), key, value));
  return Value(None());
}

Result<Value> copy(Call& c) {
  THIMBLE_LET(made, c.heap.dict());
  for (const auto& [key, value] : self_dict(c).items) THIMBLE_TRY(c.heap.set(*made, key, value));
  return Value(made);
}

constexpr Builtin kDictMethods[] = {
    {"copy", "", copy},     {"get", "key ?default", get},     {"items", "", items},
    {"keys", "", keys},     {"pop", "key ?default", pop_key}, {"update", "?mapping **", update},
    {"values", "", values},
};

// loop.cycle('odd', 'even')
Result<Value> cycle(Call& c) {
  if (c.rest.empty()) return bad("cycle has nothing to go through");
  return c.rest[(*as<Loop*>(c.self))->index % c.rest.size()];
}

constexpr Builtin kLoopMethods[] = {{"cycle", "*", cycle}};

}  // namespace

const Builtin* find_method(const Value& self, std::string_view name) {
  if (is<Text>(self)) return find_in(kTextMethods, name);
  if (is<List*>(self)) return find_in(kListMethods, name);
  if (is<Dict*>(self)) return find_in(kDictMethods, name);
  return is<Loop*>(self) ? find_in(kLoopMethods, name) : nullptr;
}

bool is_method(std::string_view name) {
  return find_in(kTextMethods, name) || find_in(kListMethods, name) || find_in(kDictMethods, name) ||
         find_in(kLoopMethods, name);
}

}  // namespace thimble::jinja
