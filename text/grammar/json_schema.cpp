// Reads JSON schemas.
#include <algorithm>
#include <array>
#include <charconv>
#include <map>

#include "text/grammar/formats.h"
#include "text/grammar/json_text.h"
#include "text/grammar/languages.h"

namespace thimble::grammar {
namespace {

using Kind = JsonValue::Kind;

constexpr uint64_t kMostValues = 100'000;
constexpr size_t kLongestName = 500;        // of a property that other names must differ from, in bytes
constexpr uint32_t kDeepest = 200;          // nesting of schemas
constexpr int64_t kMostMultiples = 10'000;  // values of `multipleOf` between bounds
constexpr int64_t kLargestDivisor = 10'000;

// Keywords that say nothing about which values are valid.
constexpr std::string_view kAnnotations[] = {"$schema",  "$id",         "$comment", "$defs",    "definitions",
                                             "title",    "description", "default",  "examples", "deprecated",
                                             "readOnly", "writeOnly",   "strict"};
// Keywords of one type. Values of other types may have any value, so these keywords also tell the type if
// `type` does not.
constexpr std::pair<std::string_view, std::string_view> kOfTypes[] = {{"properties", "object"},
                                                                      {"required", "object"},
                                                                      {"additionalProperties", "object"},
                                                                      {"items", "array"},
                                                                      {"minItems", "array"},
                                                                      {"maxItems", "array"},
                                                                      {"minLength", "string"},
                                                                      {"maxLength", "string"},
                                                                      {"pattern", "string"},
                                                                      {"format", "string"},
                                                                      {"minimum", "number"},
                                                                      {"maximum", "number"},
                                                                      {"exclusiveMinimum", "number"},
                                                                      {"exclusiveMaximum", "number"},
                                                                      {"multipleOf", "number"}};
constexpr std::string_view kOthers[] = {"type", "enum", "const", "anyOf", "allOf", "$ref"};

bool is_annotation(std::string_view key) {
  return key.starts_with("x-") ||
         std::find(std::begin(kAnnotations), std::end(kAnnotations), key) != std::end(kAnnotations);
}

std::string escaped(std::string_view name) {
  std::string out;
  for (const char c : name) out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return out;
}

// A member of an object that has these keywords and no others, apart from annotations.
bool only_has(const JsonValue& schema, std::initializer_list<std::string_view> keys) {
  return std::all_of(schema.members.begin(), schema.members.end(), [&](const auto& m) {
    return is_annotation(m.first) || std::find(keys.begin(), keys.end(), m.first) != keys.end();
  });
}

class SchemaReader {
 public:
  SchemaReader(JsonValue root, Syntax& syntax, const std::optional<JsonStrings>& strings)
      : root_(std::move(root)), syntax_(syntax), json_(syntax, strings) {}

  // The rule of the value.
  Result<uint32_t> read() {
    THIMBLE_LET(rule, rule_at("#", root_));
    while (!open_.empty()) {  // rules that were referred to
      const Open open = open_.back();
      open_.pop_back();
      THIMBLE_LET(body, value(*open.schema, open.path, 0));
      syntax_.define(open.rule, body);
    }
    return rule;
  }

 private:
  struct Open {
    uint32_t rule;
    std::string path;
    const JsonValue* schema;
  };

  static Status wrong(const std::string& path, const std::string& what) {
    return error(Code::kInvalidArgument, "JSON schema, %s: %s", path.c_str(), what.c_str());
  }
  static Status unsupported(const std::string& path, const std::string& what) {
    return error(Code::kUnsupported, "JSON schema, %s: %s", path.c_str(), what.c_str());
  }

  // The rule of the schema at a path, which is made later.
  Result<uint32_t> rule_at(const std::string& path, const JsonValue& schema) {
    const auto [known, is_new] = rules_.try_emplace(path, 0);
    if (is_new) {
      known->second = syntax_.add_rule("JSON schema, " + path + ": the value");
      open_.push_back({known->second, path, &schema});
    }
    return known->second;
  }

  // The schema that "#/a/b" points to, and its path in the form that all references share.
  Result<const JsonValue*> find(const std::string& path, const std::string& reference,
                                std::string& found) const {
    if (!reference.starts_with("#"))
      return unsupported(path, "$ref is " + reference.substr(0, 100) +
                                   "; only references inside the schema (#/...) are supported");
    const JsonValue* at = &root_;
    found = "#";
    std::string_view rest = std::string_view(reference).substr(1);
    while (!rest.empty()) {
      if (rest[0] != '/') return unsupported(path, "$ref names an anchor; only paths (#/...) are supported");
      rest.remove_prefix(1);
      const std::string_view written = rest.substr(0, rest.find('/'));
      rest.remove_prefix(written.size());
      std::string name;
      for (size_t i = 0; i < written.size(); ++i) {
        unsigned code = 0;
        if (written[i] == '~' && i + 1 < written.size() && (written[i + 1] == '0' || written[i + 1] == '1')) {
          name += written[++i] == '0' ? '~' : '/';
        } else if (written[i] == '%' && i + 2 < written.size() &&
                   std::from_chars(&written[i + 1], &written[i + 1] + 2, code, 16).ptr ==
                       &written[i + 1] + 2) {
          name += static_cast<char>(code);
          i += 2;
        } else {
          name += written[i];
        }
      }
      const JsonValue* next = nullptr;
      size_t index = 0;
      if (at->is(Kind::kObject)) next = at->find(name);
      if (at->is(Kind::kArray) &&
          std::from_chars(name.data(), name.data() + name.size(), index).ptr == name.data() + name.size() &&
          !name.empty() && index < at->items.size())
        next = &at->items[index];
      if (!next)
        return wrong(path, "$ref is " + reference.substr(0, 200) + ", which the schema does not have");
      at = next;
      found += "/" + escaped(name);
    }
    return at;
  }

  Result<Expr> value(const JsonValue& schema, const std::string& path, uint32_t depth) {
    if (depth > kDeepest) return unsupported(path, "schemas are nested too deep");
    if (syntax_.too_large() || ++values_ > kMostValues) return Syntax::too_large_error();
    if (schema.is(Kind::kBool))
      return schema.truth ? Result<Expr>(json_.any()) : wrong(path, "false allows no value");
    if (!schema.is(Kind::kObject)) return wrong(path, "a schema must be an object, true or false");
    for (const auto& member : schema.members) {
      const std::string& key = member.first;
      const auto of_type = [&](const auto& k) { return k.first == key; };
      if (!is_annotation(key) &&
          std::find(std::begin(kOthers), std::end(kOthers), key) == std::end(kOthers) &&
          std::none_of(std::begin(kOfTypes), std::end(kOfTypes), of_type))
        return unsupported(path + "/" + escaped(key), "this keyword is not supported");
    }
    if (const JsonValue* reference = schema.find("$ref")) {
      if (!only_has(schema, {"$ref"})) return unsupported(path, "keywords next to $ref are not supported");
      if (!reference->is(Kind::kString)) return wrong(path + "/$ref", "must be a string");
      std::string found;
      THIMBLE_LET(target, find(path, reference->text, found));
      THIMBLE_LET(rule, rule_at(found, *target));
      return syntax_.rule(rule);
    }
    if (const JsonValue* all = schema.find("allOf")) {
      if (!all->is(Kind::kArray) || all->items.size() != 1)
        return unsupported(path + "/allOf", "only one schema is supported in allOf");
      return branch(schema, "allOf", all->items[0], path + "/allOf/0", depth);
    }
    if (const JsonValue* any = schema.find("anyOf")) return any_of(schema, *any, path, depth);
    if (schema.find("enum") || schema.find("const")) return listed(schema, path);
    return typed(schema, path, depth);
  }

  Result<Expr> any_of(const JsonValue& schema, const JsonValue& any, const std::string& path,
                      uint32_t depth) {
    if (!any.is(Kind::kArray) || any.items.empty())
      return wrong(path + "/anyOf", "must be a list of schemas");
    std::vector<Expr> ways;
    for (size_t i = 0; i < any.items.size(); ++i) {
      if (any.items[i].is(Kind::kBool) && !any.items[i].truth) continue;
      THIMBLE_LET(way, branch(schema, "anyOf", any.items[i], path + "/anyOf/" + std::to_string(i), depth));
      ways.push_back(way);
    }
    if (ways.empty()) return wrong(path + "/anyOf", "no schema of the list allows a value");
    return syntax_.choice(std::move(ways));
  }

  // A schema of anyOf or allOf, together with the keywords next to that keyword.
  Result<Expr> branch(const JsonValue& outer, std::string_view keyword, const JsonValue& inner,
                      const std::string& path, uint32_t depth) {
    if (only_has(outer, {keyword})) return value(inner, path, depth + 1);
    if (inner.is(Kind::kBool) && !inner.truth) return wrong(path, "false allows no value");
    const JsonValue* schema = &inner;
    std::string found;
    if (const JsonValue* reference = inner.find("$ref"); reference && reference->is(Kind::kString)) {
      if (!only_has(inner, {"$ref"})) return unsupported(path, "keywords next to $ref are not supported");
      THIMBLE_SET(schema, find(path, reference->text, found));
    }
    for (const auto& [closed, other] : {std::pair(&outer, schema), std::pair(schema, &outer)}) {
      const JsonValue* more = closed->find("additionalProperties");
      const JsonValue* others = other->find("properties");
      if (!more || (more->is(Kind::kBool) && more->truth) || !others) continue;
      const JsonValue* listed = closed->find("properties");
      for (const auto& [name, ignored] : others->members)
        if (!listed || !listed->find(name))
          return unsupported(path, "additionalProperties and the property " + escaped(name) +
                                       ", which it does not see, are on different sides of " +
                                       std::string(keyword));
    }
    JsonValue both;
    both.kind = Kind::kObject;
    both.members = schema->members;
    for (const auto& member : outer.members) {
      const std::string& key = member.first;
      const JsonValue& outer_value = member.second;
      if (key == keyword || is_annotation(key)) continue;
      const auto same = std::find_if(both.members.begin(), both.members.end(),
                                     [&](const auto& m) { return m.first == key; });
      if (same == both.members.end()) {
        both.members.emplace_back(key, outer_value);
      } else if (key == "required" && same->second.is(Kind::kArray)) {
        same->second.items.insert(same->second.items.end(), outer_value.items.begin(),
                                  outer_value.items.end());
      } else if (key == "properties" && same->second.is(Kind::kObject)) {
        std::vector<std::pair<std::string, JsonValue>> merged = outer_value.members;
        for (const auto& m : same->second.members) {
          const JsonValue* twice = outer_value.find(m.first);
          if (twice && !(*twice == m.second))
            return unsupported(path + "/properties/" + escaped(m.first),
                               "another schema of this property is next to " + std::string(keyword));
          if (!twice) merged.push_back(m);
        }
        same->second.members = std::move(merged);
      } else if (!(same->second == outer_value)) {
        return unsupported(path + "/" + escaped(key),
                           "another value of this keyword is next to " + std::string(keyword));
      }
    }
    return value(both, path, depth + 1);
  }

  // ---- types ----

  static bool known_type(std::string_view type) {
    constexpr std::string_view kTypes[] = {"object",  "array",   "string", "number",
                                           "integer", "boolean", "null"};
    return std::find(std::begin(kTypes), std::end(kTypes), type) != std::end(kTypes);
  }

  // The types of a schema; without any, all types are allowed.
  Result<std::vector<std::string>> types(const JsonValue& schema, const std::string& path) {
    std::vector<std::string> types;
    if (const JsonValue* type = schema.find("type")) {
      const std::vector<JsonValue> one = {*type};
      for (const JsonValue& t : type->is(Kind::kArray) ? type->items : one) {
        if (!t.is(Kind::kString) || !known_type(t.text))
          return wrong(path + "/type", "this type is not known");
        types.push_back(t.text);
      }
      if (types.empty()) return wrong(path + "/type", "an empty list allows no value");
      return types;
    }
    for (const auto& [key, type] : kOfTypes)
      if (schema.find(key) && std::find(types.begin(), types.end(), type) == types.end())
        types.emplace_back(type);
    return types;
  }

  static bool has_type(const JsonValue& value, std::string_view type) {
    Decimal number;
    switch (value.kind) {
      case Kind::kNull:
        return type == "null";
      case Kind::kBool:
        return type == "boolean";
      case Kind::kNumber:
        return type == "number" ||
               (type == "integer" && Decimal::read(value.text, number) && number.fraction.empty());
      case Kind::kString:
        return type == "string";
      case Kind::kArray:
        return type == "array";
      case Kind::kObject:
        return type == "object";
    }
    return false;
  }

  // Values of `enum` or `const`.
  Result<Expr> listed(const JsonValue& schema, const std::string& path) {
    if (!only_has(schema, {"enum", "const", "type"}))
      return unsupported(path, "next to enum and const, only type is supported");
    THIMBLE_LET(types, this->types(schema, path));
    const JsonValue* list = schema.find("enum");
    const JsonValue* single = schema.find("const");
    if (list && !list->is(Kind::kArray)) return wrong(path + "/enum", "must be a list");
    std::vector<JsonValue> values = list ? list->items : std::vector<JsonValue>{*single};
    std::erase_if(values, [&](const JsonValue& v) {
      const bool typed = types.empty() || std::any_of(types.begin(), types.end(),
                                                      [&](const std::string& t) { return has_type(v, t); });
      return !typed || (list && single && !(v == *single));
    });
    if (values.empty()) return wrong(path + (list ? "/enum" : "/const"), "no value of the list is allowed");
    std::vector<Expr> ways;
    for (const JsonValue& v : values) ways.push_back(json_.exactly(v));
    return syntax_.choice(std::move(ways));
  }

  Result<Expr> typed(const JsonValue& schema, const std::string& path, uint32_t depth) {
    THIMBLE_LET(types, this->types(schema, path));
    if (types.empty()) return json_.any();
    std::vector<Expr> ways;
    for (const std::string& type : types) {
      if (type == "integer" && std::find(types.begin(), types.end(), "number") != types.end()) continue;
      THIMBLE_LET(way, of_type(schema, type, path, depth));
      ways.push_back(way);
    }
    return syntax_.choice(std::move(ways));
  }

  Result<Expr> of_type(const JsonValue& schema, const std::string& type, const std::string& path,
                       uint32_t depth) {
    if (type == "object") return object(schema, path, depth);
    if (type == "array") return array(schema, path, depth);
    if (type == "string") return string(schema, path);
    if (type == "number" || type == "integer") return number(schema, type == "integer", path);
    if (type == "boolean") return syntax_.choice({syntax_.literal("true"), syntax_.literal("false")});
    return syntax_.literal("null");
  }

  // The value of a keyword that counts something, or `absent`.
  Result<uint32_t> count(const JsonValue& schema, const char* key, const std::string& path, uint32_t absent) {
    constexpr uint32_t kMost = 1'000'000;
    const JsonValue* value = schema.find(key);
    if (!value) return absent;
    Decimal number;
    if (!value->is(Kind::kNumber) || !Decimal::read(value->text, number) || number.negative ||
        !number.fraction.empty())
      return wrong(path + "/" + key, "must be a number that is not negative and whole");
    const uint64_t n = number.whole.empty() ? 0 : std::stoull(number.whole);
    if (n > kMost) return unsupported(path + "/" + key, "is larger than 1000000, which is not supported");
    return static_cast<uint32_t>(n);
  }
  Status counts(const JsonValue& schema, const char* least, const char* most, const std::string& path,
                uint32_t& min, uint32_t& max) {
    THIMBLE_SET(min, count(schema, least, path, 0));
    THIMBLE_SET(max, count(schema, most, path, kUnbounded));
    if (min > max)
      return wrong(path + "/" + least, std::string("is larger than ") + most + ", which allows no value");
    return {};
  }

  Result<Expr> string(const JsonValue& schema, const std::string& path) {
    uint32_t min = 0, max = kUnbounded;
    THIMBLE_TRY(counts(schema, "minLength", "maxLength", path, min, max));
    const bool counted = min > 0 || max != kUnbounded;
    const JsonValue* pattern = schema.find("pattern");
    const JsonValue* format = schema.find("format");
    if (!pattern && !format) return counted ? json_.any_string(min, max) : json_.any_string();
    const char* key = pattern ? "/pattern" : "/format";
    if ((pattern && format) || counted)
      return unsupported(path + key, "is not supported together with " +
                                         std::string(counted ? "minLength and maxLength" : "format"));
    if (!(pattern ? pattern : format)->is(Kind::kString)) return wrong(path + key, "must be a string");
    const std::string expression = pattern ? pattern->text : format_pattern(format->text);
    if (format && expression.empty())
      return unsupported(path + key, "this format is not supported; known are " + format_names());
    const Written written = [this](const CodeSet& set) { return json_.written(set); };
    const Result<Expr> content =
        add_regex(syntax_, expression, pattern ? Match::kAnywhere : Match::kWhole, written);
    if (!content.ok())
      return Status(content.status().code(),
                    "JSON schema, " + path + key + ": " + content.status().message());
    return json_.quoted(*content);
  }

  // ---- numbers ----

  Status bound(const JsonValue& schema, const char* closed, const char* open, bool lower,
               const std::string& path, Bound& out) {
    for (const char* key : {closed, open}) {
      const JsonValue* value = schema.find(key);
      if (!value) continue;
      Decimal number;
      if (!value->is(Kind::kNumber) || !Decimal::read(value->text, number))
        return wrong(path + "/" + key, "must be a number of at most 18 digits before and after the point");
      if (number.zero()) number.negative = false;
      const Bound b{number, key == open};
      const int order = out.value ? compare(number, *out.value) : 0;
      if (!out.value || (lower ? order > 0 : order < 0) || (order == 0 && b.open)) out = b;
    }
    return {};
  }

  static int compare(const Decimal& a, const Decimal& b) {
    if (a.negative != b.negative) return a.negative ? -1 : 1;
    int order = 0;
    if (a.whole.size() != b.whole.size())
      order = a.whole.size() < b.whole.size() ? -1 : 1;
    else if (a.whole != b.whole)
      order = a.whole < b.whole ? -1 : 1;
    else if (a.fraction != b.fraction)
      order = a.fraction < b.fraction ? -1 : 1;
    return a.negative ? -order : order;
  }

  // The nearest integer inside of a bound.
  static std::optional<int64_t> inside(const Bound& b, bool lower) {
    if (!b.value) return std::nullopt;
    int64_t n = b.value->whole.empty() ? 0 : static_cast<int64_t>(std::stoull(b.value->whole));
    if (b.value->negative) n = -n;
    const bool exact = b.value->fraction.empty();
    if (exact) return b.open ? (lower ? n + 1 : n - 1) : n;
    if (lower) return b.value->negative ? n : n + 1;
    return b.value->negative ? n - 1 : n;
  }

  Result<Expr> number(const JsonValue& schema, bool integer, const std::string& path) {
    Bound low, high;
    THIMBLE_TRY(bound(schema, "minimum", "exclusiveMinimum", true, path, low));
    THIMBLE_TRY(bound(schema, "maximum", "exclusiveMaximum", false, path, high));
    if (low.value && high.value) {
      const int order = compare(*low.value, *high.value);
      if (order > 0 || (order == 0 && (low.open || high.open)))
        return wrong(path, "no number is between the minimum and the maximum");
    }
    const bool bounded = low.value || high.value;
    if (const JsonValue* factor = schema.find("multipleOf")) {
      Decimal step;
      if (!factor->is(Kind::kNumber) || !Decimal::read(factor->text, step) || step.negative || step.zero())
        return wrong(path + "/multipleOf",
                     "must be a number above 0, of at most 18 digits before and after the point");
      return multiples(step, integer, bounded, inside(low, true), inside(high, false), path + "/multipleOf");
    }
    if (integer) {
      const std::optional<int64_t> first = inside(low, true), last = inside(high, false);
      if (first && last && *first > *last)
        return wrong(path, "no integer is between the minimum and the maximum");
      return bounded ? json_.integer_between(first, last) : json_.any_integer();
    }
    return bounded ? json_.number_between(low, high) : json_.any_number();
  }

  Result<Expr> multiples(const Decimal& step, bool integer, bool bounded, std::optional<int64_t> first,
                         std::optional<int64_t> last, const std::string& path) {
    if (!step.fraction.empty()) {
      const bool power = step.whole.empty() &&
                         step.fraction.find_first_not_of('0') == step.fraction.size() - 1 &&
                         step.fraction.back() == '1';
      if (!power || (bounded && !integer))
        return unsupported(path, "a fraction is supported only if it is 0.1, 0.01 and so on, without bounds");
      if (integer && bounded) {
        if (first && last && *first > *last)
          return wrong(path, "no integer is between the minimum and the maximum");
        return json_.integer_between(first, last);
      }
      return integer ? json_.any_integer() : json_.with_decimals(static_cast<uint32_t>(step.fraction.size()));
    }
    const auto divisor = static_cast<int64_t>(std::stoull(step.whole));
    if (bounded) {
      if (!first || !last || (*last - *first) / divisor > kMostMultiples)
        return unsupported(
            path, "together with a bound, both bounds are needed, with at most 10000 multiples between them");
      std::vector<Expr> ways;
      int64_t n = *first / divisor * divisor;
      if (n < *first) n += divisor;
      for (; n <= *last; n += divisor) ways.push_back(syntax_.literal(std::to_string(n)));
      if (ways.empty()) return wrong(path, "no multiple is between the minimum and the maximum");
      return syntax_.choice(std::move(ways));
    }
    if (divisor > kLargestDivisor) return unsupported(path, "is larger than 10000, which is not supported");
    return json_.multiple_of(static_cast<uint32_t>(divisor));
  }

  // ---- arrays and objects ----

  // A schema as a rule of its own, which may be used in several places.
  Result<Expr> own_rule(const JsonValue& schema, const std::string& path, uint32_t depth) {
    const uint32_t rule = syntax_.add_rule("JSON schema, " + path + ": the value");
    THIMBLE_LET(body, value(schema, path, depth + 1));
    syntax_.define(rule, body);
    return syntax_.rule(rule);
  }

  Result<Expr> array(const JsonValue& schema, const std::string& path, uint32_t depth) {
    uint32_t min = 0, max = kUnbounded;
    THIMBLE_TRY(counts(schema, "minItems", "maxItems", path, min, max));
    const JsonValue* items = schema.find("items");
    if (items && items->is(Kind::kBool) && !items->truth) {
      if (min > 0) return wrong(path + "/items", "false allows no items, but minItems asks for some");
      max = 0;
    }
    if (max == 0) return json_.array(syntax_.empty(), 0, 0);
    if (!items) return json_.array(json_.any(), min, max);
    THIMBLE_LET(item, own_rule(*items, path + "/items", depth));
    return json_.array(item, min, max);
  }

  struct Member {
    Expr expression;
    bool required;
  };

  Result<Expr> object(const JsonValue& schema, const std::string& path, uint32_t depth) {
    const JsonValue none{.kind = Kind::kObject, .text = {}, .items = {}, .members = {}};
    const JsonValue* properties = schema.find("properties");
    const JsonValue* required = schema.find("required");
    const JsonValue* more = schema.find("additionalProperties");
    if (properties && !properties->is(Kind::kObject)) return wrong(path + "/properties", "must be an object");
    if (required && !required->is(Kind::kArray)) return wrong(path + "/required", "must be a list of names");
    std::vector<std::string> needed;
    if (required)
      for (const JsonValue& name : required->items) {
        if (!name.is(Kind::kString)) return wrong(path + "/required", "must be a list of names");
        needed.push_back(name.text);
      }
    // Without properties, an object may have any members. With properties it has only these, unless
    // additionalProperties says otherwise.
    const bool closed =
        more ? more->is(Kind::kBool) && !more->truth : properties && !properties->members.empty();
    if (!properties && !required && !closed && !more) return json_.any_object();

    std::vector<std::string> names;
    std::vector<Member> members;
    const JsonValue& listed = properties ? *properties : none;
    const auto is_needed = [&](const std::string& name) {
      return std::find(needed.begin(), needed.end(), name) != needed.end();
    };
    const auto add = [&](const std::string& name, const JsonValue& member, const std::string& at) -> Status {
      names.push_back(name);
      THIMBLE_LET(inside, own_rule(member, at, depth));
      const uint32_t rule = syntax_.add_rule("JSON schema, " + at + ": the property");
      syntax_.define(rule, syntax_.sequence({json_.name(name), json_.colon(), inside}));
      members.push_back({syntax_.rule(rule), is_needed(name)});
      return {};
    };
    for (const auto& [name, member] : listed.members) {
      const std::string at = path + "/properties/" + escaped(name);
      if (member.is(Kind::kBool) && !member.truth) {
        if (is_needed(name)) return wrong(at, "the property is required, but false allows no value");
        names.push_back(name);
        continue;
      }
      THIMBLE_TRY(add(name, member, at));
    }
    const JsonValue anything{.kind = Kind::kBool, .truth = true, .text = {}, .items = {}, .members = {}};
    for (const std::string& name : needed) {
      if (std::find(names.begin(), names.end(), name) != names.end()) continue;
      if (more && closed)
        return wrong(
            path + "/required",
            "asks for \"" + name + "\", which properties does not have and additionalProperties forbids");
      const bool given = more && !more->is(Kind::kBool);
      THIMBLE_TRY(
          add(name, given ? *more : anything, path + (given ? "/additionalProperties" : "/required")));
    }
    std::optional<Expr> extra;
    if (!closed) {
      Expr value = json_.any();
      if (more && !more->is(Kind::kBool))
        THIMBLE_SET(value, own_rule(*more, path + "/additionalProperties", depth));
      for (const std::string& n : names)
        if (n.size() > kLongestName)
          return unsupported(path + "/properties",
                             "a name has more than 500 bytes, and additionalProperties "
                             "allows others");
      const Expr name = names.empty() ? json_.any_string() : json_.string_except(names);
      extra = syntax_.sequence({name, json_.colon(), value});
    }
    return members_of(members, extra);
  }

  // The members in their order. There is a rule for the rest of the object from each member on, before and
  // after the first member that is there, because a comma comes before all others.
  Expr members_of(const std::vector<Member>& members, const std::optional<Expr>& extra) {
    const Expr close = syntax_.literal("}");
    std::vector<Expr> ends = {json_.space(), close};
    std::vector<Expr> first_ways = {close};
    if (extra) {
      const Expr others = syntax_.repeat(syntax_.sequence({json_.comma(), *extra}), 0, kUnbounded);
      first_ways.push_back(syntax_.sequence({*extra, others, json_.space(), close}));
      ends.insert(ends.begin(), others);
    }
    Expr first = syntax_.choice(first_ways), next = syntax_.sequence(ends);
    for (size_t i = members.size(); i-- > 0;) {
      const uint32_t rest = syntax_.add_rule("the rest of an object");
      syntax_.define(rest, next);
      std::vector<Expr> nexts = {
          syntax_.sequence({json_.comma(), members[i].expression, syntax_.rule(rest)})};
      std::vector<Expr> firsts = {syntax_.sequence({members[i].expression, syntax_.rule(rest)})};
      if (!members[i].required) {
        const uint32_t later = syntax_.add_rule("the rest of an object");
        syntax_.define(later, first);
        firsts.push_back(syntax_.rule(later));
        nexts.push_back(syntax_.rule(rest));
      }
      first = syntax_.choice(std::move(firsts));
      next = syntax_.choice(std::move(nexts));
    }
    return syntax_.sequence({syntax_.literal("{"), json_.space(), first});
  }

  const JsonValue root_;
  Syntax& syntax_;
  JsonText json_;
  std::map<std::string, uint32_t> rules_;  // by path
  std::vector<Open> open_;
  uint64_t values_ = 0;  // calls of value(): references next to other keywords are followed again each time
};

}  // namespace

Result<Syntax> read_json_schema(std::string_view schema) {
  Syntax syntax;
  THIMBLE_LET(value, add_json_schema(syntax, schema));
  syntax.set_root(syntax[value].rule);
  return syntax;
}

Result<Expr> add_json_schema(Syntax& syntax, std::string_view schema,
                             const std::optional<JsonStrings>& strings) {
  THIMBLE_LET(root, JsonValue::read(schema, "the JSON schema"));
  THIMBLE_LET(rule, SchemaReader(std::move(root), syntax, strings).read());
  return syntax.rule(rule);
}

}  // namespace thimble::grammar
