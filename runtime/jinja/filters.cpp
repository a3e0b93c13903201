// Filters: x | NAME.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "runtime/jinja/machine.h"
#include "runtime/jinja/table.h"
#include "runtime/jinja/text.h"

namespace thimble::jinja {
namespace {

// The subject as a text; an undefined one is empty.
Result<Text> subject_text(Call& c) { return printed(c.heap, c.self); }

Status bad(const std::string& what) { return error(Code::kInvalidArgument, "%s", what.c_str()); }

// "function.name" of an element, or the element itself where the path is undefined.
Result<Value> at_path(Call& c, const Value& item, const Value& path) {
  if (is<Undefined>(path)) return item;
  if (is<int64_t>(path)) return c.machine.item(item, path);
  if (!is<Text>(path)) return bad("an attribute is named by a text");
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

// ---- texts ----

template <std::string_view (*first)(std::string_view, const std::string*),
          std::string_view (*second)(std::string_view, const std::string*)>
Result<Value> strip(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  const std::string* set = as_text(c.arguments[0]);
  if (set) THIMBLE_TRY(c.heap.spend_steps(text->size() * set->size() / 64));
  return c.heap.text(std::string(second(first(*text, set), set)));
}

template <std::string (*changed)(std::string_view)>
Result<Value> change(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  THIMBLE_TRY(c.heap.spend_bytes(text->size()));
  return c.heap.text(changed(*text));
}

std::string title(std::string_view text) {
  std::string out;
  bool starts = true;
  for (const char letter : text) {
    out += starts ? upper({&letter, 1}) : lower({&letter, 1});
    starts = std::string_view(" \t\n\v\f\r-({[<").find(letter) != std::string_view::npos;
  }
  return out;
}

Result<Value> replace(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  THIMBLE_LET(old, printed(c.heap, c.arguments[0]));
  THIMBLE_LET(with, printed(c.heap, c.arguments[1]));
  return call_builtin(c.machine, *find_method(Value(text), "replace"), Value(text), {Value(old), Value(with)},
                      {});
}

Result<Value> indent(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  std::string margin;
  if (const std::string* given = as_text(c.arguments[0])) {
    margin = *given;
  } else {
    THIMBLE_LET(width, c.integer(0, 4));
    if (width > 1000) return bad("an indent is wider than 1000");
    margin.assign(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
  }
  const bool first = c.flag(1), blank = c.flag(2);
  std::string out = first ? margin : "";
  // As if a newline more were there, so that one at the end is kept.
  const std::string whole = *text + "\n";
  bool starts = true;
  for (const std::string_view line : split_lines(whole)) {
    THIMBLE_TRY(c.heap.spend_bytes(margin.size() + line.size()));
    if (!starts) out += "\n" + (blank || !line.empty() ? margin : "");
    out += line;
    starts = false;
  }
  return c.heap.text(std::move(out));
}

Result<Value> as_string(Call& c) {
  THIMBLE_LET(text, subject_text(c));
  return Value(text);
}

Result<Value> unchanged(Call& c) { return c.self; }

// ---- numbers ----

Result<Value> to_integer(Call& c) {
  const Value otherwise = c.given(0) ? c.arguments[0] : Value(int64_t{0});
  THIMBLE_LET(base, c.integer(1, 10));
  if (base < 2 || base > 36) return bad("the base of a number is 2 to 36");
  int64_t room = 0;
  if (const int64_t* integer = as_integer(c.self, room)) return Value(*integer);
  double number = 0;
  if (const double* real = as<double>(c.self)) {
    number = *real;
  } else if (const std::string* text = as_text(c.self)) {
    const std::string_view digits = strip_end(strip_start(*text, nullptr), nullptr);
    const char *begin = digits.data(), *end = begin + digits.size();
    if (digits.size() > 1 && *begin == '+') ++begin;
    int64_t integer = 0;
    const auto read = std::from_chars(begin, end, integer, static_cast<int>(base));
    if (read.ptr == end && read.ec == std::errc() && begin != end) return Value(integer);
    const auto real_read = std::from_chars(begin, end, number);
    if (real_read.ptr != end || real_read.ec != std::errc()) return otherwise;
  } else {
    return otherwise;
  }
  if (!(std::abs(number) < 9e18)) return otherwise;
  return Value(static_cast<int64_t>(number));
}

Result<Value> to_float(Call& c) {
  int64_t room = 0;
  if (const int64_t* integer = as_integer(c.self, room)) return Value(static_cast<double>(*integer));
  if (is<double>(c.self)) return c.self;
  const Value otherwise = c.given(0) ? c.arguments[0] : Value(0.0);
  const std::string* text = as_text(c.self);
  if (!text) return otherwise;
  const std::string_view digits = strip_end(strip_start(*text, nullptr), nullptr);
  double number = 0;
  const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return read.ptr == digits.data() + digits.size() && read.ec == std::errc() ? Value(number) : otherwise;
}

Result<Value> absolute(Call& c) {
  if (const double* real = as<double>(c.self)) return Value(std::abs(*real));
  int64_t room = 0;
  const int64_t* integer = as_integer(c.self, room);
  if (!integer) return bad(std::string(kind_name(c.self)) + " has no absolute value");
  return *integer < 0 ? arithmetic(c.heap, "-", Value(int64_t{0}), c.self) : Result<Value>(*integer);
}

// ---- lists and dicts ----

Result<Value> length(Call& c) {
  if (const std::string* text = as_text(c.self)) {
    THIMBLE_TRY(c.heap.spend_steps(text->size() / 16));
    return Value(static_cast<int64_t>(character_count(*text)));
  }
  if (List* const* list = as<List*>(c.self)) return Value(static_cast<int64_t>((*list)->items.size()));
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
  std::string out;
  for (size_t i = 0; i < all->items.size(); ++i) {
    THIMBLE_LET(item, at_path(c, all->items[i], c.arguments[1]));
    THIMBLE_LET(text, printed(c.heap, item));
    THIMBLE_TRY(c.heap.spend_bytes(between->size() + text->size()));
    if (i) out += *between;
    out += *text;
  }
  return c.heap.text(std::move(out));
}

Result<Value> pair(Call& c, const Value& key, const Value& value) {
  THIMBLE_LET(both, c.heap.list(true));
  THIMBLE_TRY(c.heap.append(*both, key));
  THIMBLE_TRY(c.heap.append(*both, value));
  return Value(both);
}

Result<Value> items(Call& c) {
  THIMBLE_LET(all, c.heap.list());
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
  THIMBLE_LET(all, elements(c.heap, c.self));
  return all->items.empty() ? Value() : all->items.front();
}

Result<Value> last(Call& c) {
  THIMBLE_LET(all, elements(c.heap, c.self));
  return all->items.empty() ? Value() : all->items.back();
}

Result<Value> reverse(Call& c) {
  THIMBLE_LET(from, elements(c.heap, c.self));
  THIMBLE_LET(all, c.heap.list());
  for (size_t i = from->items.size(); i-- > 0;) THIMBLE_TRY(c.heap.append(*all, from->items[i]));
  if (!is<Text>(c.self)) return Value(all);
  std::string text;
  for (const Value& character : all->items) text += *as_text(character);
  return c.heap.text(std::move(text));
}

// What elements are ordered and compared by: texts without regard to case, unless asked for.
Result<Value> sort_key(Call& c, const Value& item, const Value& path, bool with_case) {
  THIMBLE_LET(value, at_path(c, item, path));
  const std::string* text = as_text(value);
  if (with_case || !text) return std::move(value);
  return c.heap.text(lower(*text));
}

struct Keyed {
  Value key, item;
};

// Merges, so that the order of equal elements stays, and a comparison may fail.
Status merge_sort(Heap& heap, std::vector<Keyed>& all, bool down) {
  THIMBLE_TRY(heap.spend_bytes(all.size() * sizeof(Keyed)));
  std::vector<Keyed> from;
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

Result<Value> sorted(Call& c, const std::vector<Value>& from, const Value& path, bool with_case, bool down) {
  std::vector<Keyed> keyed;
  for (const Value& item : from) {
    THIMBLE_LET(key, sort_key(c, item, path, with_case));
    THIMBLE_TRY(need_defined(key));
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
  if (!is<Dict*>(c.self)) return bad(std::string(kind_name(c.self)) + " is no dict that could be sorted");
  THIMBLE_LET(all, items(c));
  const std::string* by = as_text(c.arguments[1]);
  if (by && *by != "key" && *by != "value") return bad("dictsort sorts by 'key' or 'value'");
  return sorted(c, (*as<List*>(all))->items, Value(int64_t{by && *by == "value"}), c.flag(0), c.flag(2));
}

Result<Value> unique(Call& c) {
  THIMBLE_LET(from, elements(c.heap, c.self));
  THIMBLE_LET(all, c.heap.list());
  std::vector<Value> seen;
  for (const Value& item : from->items) {
    THIMBLE_LET(key, sort_key(c, item, c.arguments[1], c.flag(0)));
    bool known = false;
    for (size_t i = 0; i < seen.size() && !known; ++i) {
      THIMBLE_LET(same, equal(c.heap, seen[i], key));
      known = same;
    }
    if (known) continue;
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

// The arguments from `i` on.
std::vector<Value> from(const std::vector<Value>& all, size_t i) {
  return {all.begin() + static_cast<std::ptrdiff_t>(std::min(i, all.size())), all.end()};
}

// select(test, ...), reject: elements for which a test holds; selectattr(path, test, ...), rejectattr: by an
// attribute.
template <bool by_attribute, bool wanted>
Result<Value> select(Call& c) {
  THIMBLE_LET(all, c.heap.list());
  if (!truth(c.self)) return Value(all);
  THIMBLE_LET(elements_, elements(c.heap, c.self));
  if (by_attribute && c.rest.empty()) return bad("selectattr and rejectattr need the name of an attribute");
  const size_t test = by_attribute ? 1 : 0;
  const std::vector<Value> items = elements_->items;
  for (const Value& item : items) {
    THIMBLE_LET(value, at_path(c, item, by_attribute ? c.rest[0] : Value()));
    bool holds = truth(value);
    if (c.rest.size() > test) {
      const std::string* name = as_text(c.rest[test]);
      if (!name) return bad("a test is named by a text");
      THIMBLE_LET(tested, c.machine.call_test(*name, value, from(c.rest, test + 1)));
      holds = tested;
    }
    if (holds == wanted) THIMBLE_TRY(c.heap.append(*all, item));
  }
  return Value(all);
}

// map(attribute=path, default=value), or map(filter, ...).
Result<Value> map(Call& c) {
  THIMBLE_LET(all, c.heap.list());
  if (!truth(c.self)) return Value(all);
  THIMBLE_LET(elements_, elements(c.heap, c.self));
  const std::vector<Value> items = elements_->items;
  for (const Value& item : items) {
    Value mapped;
    if (c.given(0)) {
      THIMBLE_LET(value, at_path(c, item, c.arguments[0]));
      mapped = is<Undefined>(value) ? c.arguments[1] : value;
    } else {
      const std::string* name = c.rest.empty() ? nullptr : as_text(c.rest[0]);
      if (!name) return bad("map needs the name of a filter, or attribute=");
      THIMBLE_LET(value, c.machine.call_filter(*name, item, from(c.rest, 1)));
      mapped = value;
    }
    THIMBLE_TRY(c.heap.append(*all, mapped));
  }
  return Value(all);
}

constexpr Builtin kFilters[] = {
    {"abs", "", absolute},
    {"capitalize", "", change<capitalized>},
    {"count", "", length},
    {"d", "?default_value ?boolean", default_value},
    {"default", "?default_value ?boolean", default_value},
    {"dictsort", "?case_sensitive ?by ?reverse", dictsort},
    {"first", "", first},
    {"float", "?default", to_float},
    {"from_json", "", from_json},
    {"indent", "?width ?first ?blank", indent},
    {"int", "?default ?base", to_integer},
    {"items", "", items},
    {"join", "?d ?attribute", join},
    {"last", "", last},
    {"length", "", length},
    {"list", "", to_list},
    {"lower", "", change<lower>},
    {"map", "* ?attribute ?default", map},
    {"max", "?case_sensitive ?attribute", extreme<true>},
    {"min", "?case_sensitive ?attribute", extreme<false>},
    {"reject", "*", select<false, false>},
    {"rejectattr", "*", select<true, false>},
    {"replace", "old new", replace},
    {"reverse", "", reverse},
    {"safe", "", unchanged},
    {"select", "*", select<false, true>},
    {"selectattr", "*", select<true, true>},
    {"sort", "?reverse ?case_sensitive ?attribute", sort},
    {"string", "", as_string},
    {"sum", "?attribute ?start", sum},
    {"title", "", change<title>},
    {"tojson", "?ensure_ascii ?indent ?separators ?sort_keys", to_json},
    {"trim", "?chars", strip<strip_start, strip_end>},
    {"unique", "?case_sensitive ?attribute", unique},
    {"upper", "", change<upper>},
};

}  // namespace

const Builtin* find_filter(std::string_view name) { return find_in(kFilters, name); }

}  // namespace thimble::jinja
