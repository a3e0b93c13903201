// Filters for lists and dicts: x | NAME.
#include <algorithm>
#include <charconv>

#include "templates/jinja/letters.h"
#include "templates/jinja/machine.h"
#include "templates/jinja/table.h"
#include "templates/jinja/text.h"

namespace thimble::jinja {
namespace {

Status bad(const std::string& what) { return error(Code::kInvalidArgument, "%s", what.c_str()); }

// The member of an element at the path "function.name"; the element itself if the path is undefined.
Result<Value> at_path(Call& c, const Value& item, const Value& path) {
  if (is<Undefined>(path)) return item;
  if (is<int64_t>(path)) return c.machine.item(item, path);
  if (!is<Text>(path)) return bad("the name of an attribute must be a text");
  Value value = item;
  std::string_view rest = **as<Text>(path);
  for (bool more = true; more;) {
    const size_t end = std::min(rest.find('.'), rest.size());
    const std::string_view part = rest.substr(0, end);
    more = end < rest.size();
    rest.remove_prefix(std::min(end + 1, rest.size()));
    int64_t index = 0;
    const auto read = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool is_index = !part.empty() && read.ptr == part.data() + part.size() && part[0] != '-';
    THIMBLE_LET(next, c.machine.item(value, is_index ? Value(index) : make_text(part)));
    value = next;
  }
  return value;
}

// ---- lists and dicts ----

Result<Value> length(Call& c) {
  if (const std::string* text = as_text(c.self)) {
    THIMBLE_TRY(c.heap.spend_steps(text->size() / 16));
    return Value(static_cast<int64_t>(character_count(*text)));
  }
  if (List* const* list = as<List*>(c.self); list && (*list)->kind != List::Kind::kIterator)
    return Value(static_cast<int64_t>((*list)->items.size()));
  if (Loop* const* loop = as<Loop*>(c.self)) return Value(static_cast<int64_t>((*loop)->items->size()));
  if (Dict* const* dict = as<Dict*>(c.self)) return Value(static_cast<int64_t>((*dict)->items.size()));
  if (is<Undefined>(c.self)) return Value(int64_t{0});
  return bad(std::string(kind_name(c.self)) + " has no length");
}

Result<Value> default_value(Call& c) {
  const bool missing = is<Undefined>(c.self) || (c.flag(1) && !truth(c.self));
  if (!missing) return c.self;
  return c.given(0) ? c.arguments[0] : make_text("");
}

Result<Value> join(Call& c) {
  THIMBLE_LET(between, printed(c.heap, c.arguments[0]));
  THIMBLE_LET(all, elements(c.heap, c.self));
  TextOut out(c.heap);
  for (size_t i = 0; i < all->items.size(); ++i) {
    THIMBLE_LET(item, at_path(c, all->items[i], c.arguments[1]));
    THIMBLE_LET(text, printed(c.heap, item));
    if (i) out += *between;
    out += *text;
    THIMBLE_TRY(out.status());
  }
  return out.value();
}

Result<Value> pair(Call& c, const Value& key, const Value& value) {
  THIMBLE_LET(both, c.heap.list(List::Kind::kTuple));
  THIMBLE_TRY(c.heap.append(*both, key));
  THIMBLE_TRY(c.heap.append(*both, value));
  return Value(both);
}

Result<Value> items(Call& c) {
  THIMBLE_LET(all, c.heap.list(List::Kind::kIterator));
  if (is<Undefined>(c.self)) return Value(all);
  Dict* const* dict = as<Dict*>(c.self);
  if (!dict) return bad(std::string(kind_name(c.self)) + " has no items; only a dict has");
  for (const auto& [key, value] : (*dict)->items) {
    THIMBLE_LET(both, pair(c, key_value(key), value));
    THIMBLE_TRY(c.heap.append(*all, both));
  }
  return Value(all);
}

Result<Value> to_list(Call& c) {
  THIMBLE_LET(from, elements(c.heap, c.self));
  THIMBLE_LET(all, c.heap.list());
  for (const Value& item : from->items) THIMBLE_TRY(c.heap.append(*all, item));
  return Value(all);
}

Result<Value> first(Call& c) {
  if (List* const* list = as<List*>(c.self); list && (*list)->kind == List::Kind::kIterator) {
    std::vector<Value>& items = (*list)->items;
    if (items.empty()) return Value();
    THIMBLE_TRY(c.heap.spend_steps(items.size() / 8));
    const Value taken = items.front();
    items.erase(items.begin());
    return taken;
  }
  THIMBLE_LET(all, elements(c.heap, c.self));
  return all->items.empty() ? Value() : all->items.front();
}

Result<Value> last(Call& c) {
  if (List* const* list = as<List*>(c.self); list && (*list)->kind == List::Kind::kIterator)
    return bad("an iterator has no last element; make a list of it first");
  THIMBLE_LET(all, elements(c.heap, c.self));
  return all->items.empty() ? Value() : all->items.back();
}

Result<Value> reverse(Call& c) {
  List* const* list = as<List*>(c.self);
  const bool taken = list && (*list)->kind == List::Kind::kIterator;
  THIMBLE_LET(from, elements(c.heap, c.self));
  THIMBLE_LET(all, c.heap.list(taken ? List::Kind::kList : List::Kind::kIterator));
  for (size_t i = from->items.size(); i-- > 0;) THIMBLE_TRY(c.heap.append(*all, from->items[i]));
  if (!is<Text>(c.self)) return Value(all);
  TextOut out(c.heap);
  for (const Value& character : all->items) out += *as_text(character);
  return out.value(is_markup(c.self));
}

// The key that elements are sorted and compared by. Texts ignore case unless `with_case` is set.
Result<Value> sort_key(Call& c, const Value& item, const Value& path, bool with_case) {
  THIMBLE_LET(value, at_path(c, item, path));
  const std::string* text = as_text(value);
  if (with_case || !text) return std::move(value);
  TextOut out(c.heap);
  lower(*text, out);
  return out.value();
}

struct Keyed {
  Value key, item;
};

// A merge sort: stable, and comparisons may fail.
Status merge_sort(Heap& heap, std::vector<Keyed>& all, bool down) {
  std::vector<Keyed> from;
  THIMBLE_TRY(heap.reserve(from, all.size()));
  for (size_t width = 1; width < all.size(); width *= 2) {
    from.swap(all);
    all.clear();
    for (size_t begin = 0; begin < from.size(); begin += 2 * width) {
      const size_t middle = std::min(begin + width, from.size()),
                   end = std::min(begin + 2 * width, from.size());
      size_t a = begin, b = middle;
      while (a < middle || b < end) {
        bool take_second = a == middle;
        if (a < middle && b < end) {
          THIMBLE_LET(before,
                      down ? less(heap, from[a].key, from[b].key) : less(heap, from[b].key, from[a].key));
          take_second = before;
        }
        all.push_back(std::move(from[take_second ? b++ : a++]));
      }
    }
  }
  return {};
}

// The key of sort(): a list of the members at the paths "a,b".
Result<Value> sort_keys(Call& c, const Value& item, const Value& paths, bool with_case) {
  THIMBLE_LET(keys, c.heap.list());
  const std::string* text = as_text(paths);
  std::string_view rest = text ? *text : std::string_view();
  do {
    const size_t end = std::min(rest.find(','), rest.size());
    THIMBLE_LET(key, sort_key(c, item, text ? make_text(rest.substr(0, end)) : paths, with_case));
    THIMBLE_TRY(c.heap.append(*keys, key));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  } while (!rest.empty());
  return Value(keys);
}

Result<Value> sorted(Call& c, const std::vector<Value>& from, const Value& path, bool with_case, bool down) {
  std::vector<Keyed> keyed;
  for (const Value& item : from) {
    THIMBLE_LET(key, sort_keys(c, item, path, with_case));
    THIMBLE_TRY(c.heap.reserve(keyed, 1));
    keyed.push_back({key, item});
  }
  THIMBLE_TRY(merge_sort(c.heap, keyed, down));
  THIMBLE_LET(all, c.heap.list());
  for (const Keyed& k : keyed) THIMBLE_TRY(c.heap.append(*all, k.item));
  return Value(all);
}

Result<Value> sort(Call& c) {
  THIMBLE_LET(all, elements(c.heap, c.self));
  return sorted(c, all->items, c.arguments[2], c.flag(1), c.flag(0));
}

Result<Value> dictsort(Call& c) {
  if (!is<Dict*>(c.self)) return bad(std::string(kind_name(c.self)) + " is not a dict, so it cannot be sorted");
  THIMBLE_LET(all, items(c));
  const std::string* by = as_text(c.arguments[1]);
  THIMBLE_LET(pairs, elements(c.heap, all));
  if (by && *by != "key" && *by != "value") return bad("dictsort sorts by 'key' or 'value'");
  return sorted(c, pairs->items, Value(int64_t{by && *by == "value"}), c.flag(0), c.flag(2));
}

Result<Value> unique(Call& c) {
  THIMBLE_LET(from, elements(c.heap, c.self));
  THIMBLE_LET(all, c.heap.list(List::Kind::kIterator));
  std::vector<Value> seen;
  for (const Value& item : from->items) {
    THIMBLE_LET(key, sort_key(c, item, c.arguments[1], c.flag(0)));
    THIMBLE_TRY(need_hashable(key));
    bool known = false;
    for (size_t i = 0; i < seen.size() && !known; ++i) {
      THIMBLE_LET(same, equal(c.heap, seen[i], key));
      known = same;
    }
    if (known) continue;
    THIMBLE_TRY(c.heap.reserve(seen, 1));
    seen.push_back(key);
    THIMBLE_TRY(c.heap.append(*all, item));
  }
  return Value(all);
}

template <bool largest>
Result<Value> extreme(Call& c) {
  THIMBLE_LET(all, elements(c.heap, c.self));
  Value best, best_key;
  for (size_t i = 0; i < all->items.size(); ++i) {
    THIMBLE_LET(key, sort_key(c, all->items[i], c.arguments[1], c.flag(0)));
    bool better = i == 0;
    if (!better) {
      THIMBLE_LET(ahead, largest ? less(c.heap, best_key, key) : less(c.heap, key, best_key));
      better = ahead;
    }
    if (better) best = all->items[i], best_key = key;
  }
  return best;
}

Result<Value> sum(Call& c) {
  THIMBLE_LET(all, elements(c.heap, c.self));
  Value total = c.given(1) ? c.arguments[1] : Value(int64_t{0});
  for (const Value& item : all->items) {
    THIMBLE_LET(value, at_path(c, item, c.arguments[0]));
    THIMBLE_LET(next, arithmetic(c.heap, "+", total, value));
    total = next;
  }
  return total;
}

// Copies the values from index `i` on.
Result<std::vector<Value>> copied(Heap& heap, const std::vector<Value>& all, size_t i) {
  i = std::min(i, all.size());
  THIMBLE_TRY(heap.spend_bytes((all.size() - i) * sizeof(Value)));
  return std::vector<Value>(all.begin() + static_cast<std::ptrdiff_t>(i), all.end());
}

// select(test, ...) and reject: elements for which a test holds or does not hold. selectattr(path, test, ...)
// and rejectattr test a member instead.
template <bool by_attribute, bool wanted>
Result<Value> select(Call& c) {
  THIMBLE_LET(all, c.heap.list(List::Kind::kIterator));
  if (!truth(c.self)) return Value(all);
  THIMBLE_LET(elements_, elements(c.heap, c.self));
  if (by_attribute && c.rest.empty()) return bad("selectattr and rejectattr need an attribute name");
  const size_t test = by_attribute ? 1 : 0;
  THIMBLE_LET(items, copied(c.heap, elements_->items, 0));
  for (const Value& item : items) {
    THIMBLE_LET(value, at_path(c, item, by_attribute ? c.rest[0] : Value()));
    bool holds = truth(value);
    if (c.rest.size() > test) {
      const std::string* name = as_text(c.rest[test]);
      if (!name) return bad("the name of a test must be a text");
      THIMBLE_LET(more, copied(c.heap, c.rest, test + 1));
      THIMBLE_LET(tested, c.machine.call_test(*name, value, std::move(more)));
      holds = tested;
    }
    if (holds == wanted) THIMBLE_TRY(c.heap.append(*all, item));
  }
  return Value(all);
}

// map(attribute=path, default=value), or map(filter, ...).
Result<Value> map(Call& c) {
  THIMBLE_LET(all, c.heap.list(List::Kind::kIterator));
  if (!truth(c.self)) return Value(all);
  THIMBLE_LET(elements_, elements(c.heap, c.self));
  THIMBLE_LET(items, copied(c.heap, elements_->items, 0));
  for (const Value& item : items) {
    Value mapped;
    if (c.given(0)) {
      THIMBLE_LET(value, at_path(c, item, c.arguments[0]));
      mapped = is<Undefined>(value) ? c.arguments[1] : value;
    } else {
      const std::string* name = c.rest.empty() ? nullptr : as_text(c.rest[0]);
      if (!name) return bad("map needs the name of a filter, or attribute=");
      THIMBLE_LET(more, copied(c.heap, c.rest, 1));
      THIMBLE_LET(value, c.machine.call_filter(*name, item, std::move(more)));
      mapped = value;
    }
    THIMBLE_TRY(c.heap.append(*all, mapped));
  }
  return Value(all);
}

// batch(count, fill): lists of `count` elements; the last one is filled up.
Result<Value> batch(Call& c) {
  THIMBLE_LET(count, c.integer(0, 0));
  THIMBLE_LET(from, elements(c.heap, c.self));
  THIMBLE_LET(all, c.heap.list(List::Kind::kIterator));
  THIMBLE_LET(first, c.heap.list());
  List* row = first;
  for (const Value& item : from->items) {
    if (static_cast<int64_t>(row->items.size()) == count) {
      THIMBLE_TRY(c.heap.append(*all, row));
      THIMBLE_LET(next, c.heap.list());
      row = next;
    }
    THIMBLE_TRY(c.heap.append(*row, item));
  }
  if (row->items.empty()) return Value(all);
  while (c.given(1) && !is<None>(c.arguments[1]) && static_cast<int64_t>(row->items.size()) < count)
    THIMBLE_TRY(c.heap.append(*row, c.arguments[1]));
  THIMBLE_TRY(c.heap.append(*all, row));
  return Value(all);
}

// slice(count, fill): `count` lists of sizes as equal as possible.
Result<Value> slice(Call& c) {
  THIMBLE_LET(count, c.integer(0, 0));
  THIMBLE_LET(from, elements(c.heap, c.self));
  if (count == 0) return bad("a slice needs at least one column");
  THIMBLE_LET(all, c.heap.list(List::Kind::kIterator));
  const auto size = static_cast<int64_t>(from->items.size());
  for (int64_t i = 0, at = 0; i < count; ++i) {
    THIMBLE_LET(column, c.heap.list());
    const int64_t most = size / count + (i < size % count);
    for (int64_t n = 0; n < most; ++n)
      THIMBLE_TRY(c.heap.append(*column, from->items[static_cast<size_t>(at++)]));
    if (c.given(1) && !is<None>(c.arguments[1]) && i >= size % count)
      THIMBLE_TRY(c.heap.append(*column, c.arguments[1]));
    THIMBLE_TRY(c.heap.append(*all, column));
  }
  return Value(all);
}

// groupby(path, default): tuples of a member's value and the elements that have it.
Result<Value> groupby(Call& c) {
  THIMBLE_LET(from, elements(c.heap, c.self));
  const auto key_of = [&](const Value& item) -> Result<Value> {
    THIMBLE_LET(key, at_path(c, item, c.arguments[0]));
    return is<Undefined>(key) && c.given(1) ? c.arguments[1] : key;
  };
  std::vector<Keyed> keyed;
  for (const Value& item : from->items) {
    THIMBLE_LET(value, key_of(item));
    THIMBLE_LET(key, sort_key(c, value, Value(), c.flag(2)));
    THIMBLE_TRY(c.heap.reserve(keyed, 1));
    keyed.push_back({key, item});
  }
  THIMBLE_TRY(merge_sort(c.heap, keyed, false));
  THIMBLE_LET(all, c.heap.list());
  List* group = nullptr;
  for (size_t i = 0; i < keyed.size(); ++i) {
    bool goes_on = group != nullptr;
    if (group) {
      THIMBLE_LET(same, equal(c.heap, keyed[i - 1].key, keyed[i].key));
      goes_on = same;
    }
    if (!goes_on) {
      THIMBLE_LET(members, c.heap.list());
      THIMBLE_LET(key, key_of(keyed[i].item));
      THIMBLE_LET(both, pair(c, key, members));
      (*as<List*>(both))->group = true;
      THIMBLE_TRY(c.heap.append(*all, both));
      group = members;
    }
    THIMBLE_TRY(c.heap.append(*group, keyed[i].item));
  }
  return Value(all);
}

// x|attr("name"): an attribute, never an element.
Result<Value> attr(Call& c) {
  THIMBLE_LET(name, c.text(0));
  THIMBLE_TRY(need_defined(c.self));
  if (is<Dict*>(c.self) && !find_method(c.self, *name)) return Value();
  return c.machine.item(c.self, Value(name));
}

constexpr Builtin kFilters[] = {
    {"attr", "name", attr},
    {"batch", "linecount ?fill_with", batch},
    {"count", "", length},
    {"d", "?default_value ?boolean", default_value},
    {"default", "?default_value ?boolean", default_value},
    {"dictsort", "?case_sensitive ?by ?reverse", dictsort},
    {"first", "", first},
    {"from_json", "", from_json},
    {"groupby", "attribute ?default ?case_sensitive", groupby},
    {"items", "", items},
    {"join", "?d ?attribute", join},
    {"last", "", last},
    {"length", "", length},
    {"list", "", to_list},
    {"map", "* ?attribute ?default", map},
    {"max", "?case_sensitive ?attribute", extreme<true>},
    {"min", "?case_sensitive ?attribute", extreme<false>},
    {"reject", "*", select<false, false>},
    {"rejectattr", "*", select<true, false>},
    {"reverse", "", reverse},
    {"select", "*", select<false, true>},
    {"selectattr", "*", select<true, true>},
    {"slice", "slices ?fill_with", slice},
    {"sort", "?reverse ?case_sensitive ?attribute", sort},
    {"sum", "?attribute ?start", sum},
    {"tojson", "?ensure_ascii ?indent ?separators ?sort_keys", to_json},
    {"unique", "?case_sensitive ?attribute", unique},
};

}  // namespace

const Builtin* find_filter(std::string_view name) {
  const Builtin* found = find_in(kFilters, name);
  return found ? found : find_text_filter(name);
}

}  // namespace thimble::jinja
