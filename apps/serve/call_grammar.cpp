// Makes grammars of tool calls (see call_grammar.h).
#include "apps/serve/call_grammar.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "apps/serve/call_format.h"
#include "apps/serve/json.h"

namespace app::serve {

namespace {

// Rewrites the references in a schema, "#/a/b", for a larger schema that contains it at `to`.
void move_references(Json& schema, const std::string& to) {
  if (!schema.is_structured()) return;
  for (auto& [name, part] : schema.items()) {
    if (name == "$ref" && part.is_string() && part.get_ref<const std::string&>().starts_with('#'))
      part = to + part.get_ref<const std::string&>().substr(1);
    else
      move_references(part, to);
  }
}

}  // namespace

bool is_strict(const Json& tool) { return tool["function"].value("strict", Json()) == true; }

Json arguments_schema(const Json& tool) {
  const Json* schema = find_field(tool["function"], "parameters");
  if (schema && schema->is_object() && !schema->empty()) return *schema;
  return {{"type", "object"}, {"properties", Json::object()}, {"additionalProperties", false}};
}

Json call_schema(const Json& tools, std::string_view only, bool all) {
  Json calls = Json::array();
  for (const Json& tool : tools) {
    const Json& name = tool["function"]["name"];
    if (!only.empty() && name != only) continue;
    const bool checked = all || is_strict(tool);
    calls.push_back({{"type", "object"},
                     {"properties", {{"name", {{"const", name}}}, {"arguments", {{"type", "object"}}}}},
                     {"required", {"name", "arguments"}},
                     {"additionalProperties", false}});
    if (checked) calls.back()["properties"]["arguments"] = arguments_schema(tool);
  }
  const bool one = calls.size() == 1;
  for (size_t i = 0; i < calls.size(); ++i)
    move_references(calls[i]["properties"]["arguments"],
                    "#" + (one ? "" : "/anyOf/" + std::to_string(i)) + "/properties/arguments");
  return one ? calls[0] : Json{{"anyOf", calls}};
}

namespace {

std::string literal(std::string_view text) { return write_json(std::string(text)); }
std::string json_value(const Json& schema) { return "%json " + write_json(schema); }

constexpr const char* kAnnotations[] = {"title", "description", "default", "examples"};
constexpr const char* kDefinitions[] = {"$defs", "definitions"};

// Whether a schema has no other keywords than these and annotations.
bool only_has(const Json& schema, std::initializer_list<std::string_view> keywords) {
  const auto is_known = [&](const auto& item) {
    return std::find(keywords.begin(), keywords.end(), item.key()) != keywords.end() ||
           std::find(std::begin(kAnnotations), std::end(kAnnotations), item.key()) != std::end(kAnnotations);
  };
  const auto items = schema.items();
  return std::all_of(items.begin(), items.end(), is_known);
}

// Whether every reference in a schema is to its root's definitions.
bool refers_to_definitions(const Json& schema) {
  if (!schema.is_structured()) return true;
  const auto is_fine = [](const auto& item) {
    if (item.key() != "$ref" || !item.value().is_string()) return refers_to_definitions(item.value());
    const auto& to = item.value().template get_ref<const std::string&>();
    return to.starts_with("#/$defs/") || to.starts_with("#/definitions/");
  };
  const auto items = schema.items();
  return std::all_of(items.begin(), items.end(), is_fine);
}

// A code point of a grammar, in quotes or brackets.
std::string escaped(std::string_view code) {
  constexpr std::string_view kSpecial = "\\\"[]^-";
  return (kSpecial.find(code) != std::string::npos ? "\\" : "") + std::string(code);
}

std::vector<std::string_view> code_points(std::string_view text) {
  std::vector<std::string_view> codes;
  for (size_t at = 0, end = 0; at < text.size(); at = end) {
    for (end = at + 1; end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80;) ++end;
    codes.push_back(text.substr(at, end - at));
  }
  return codes;
}

// The rules of a text without a mark in it, as an automaton: rule text0 is the whole text, and rule textN is
// the rest of a text that ends with the first N code points of the mark so far.
std::string text_without(std::string_view mark) {
  const std::vector<std::string_view> codes = code_points(mark);
  // A text ended with the first `held` code points of the mark, and `code` follows. Returns with how many of
  // them the text ends now.
  const auto next = [&](size_t held, std::string_view code) {
    std::vector<std::string_view> end(codes.begin(), codes.begin() + static_cast<std::ptrdiff_t>(held));
    end.push_back(code);
    size_t size = end.size();
    while (!std::equal(codes.begin(), codes.begin() + static_cast<std::ptrdiff_t>(size),
                       end.end() - static_cast<std::ptrdiff_t>(size)))
      --size;
    return size;
  };
  std::vector<std::string_view> known = codes;
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  std::string rules;
  for (size_t held = 0; held < codes.size(); ++held) {
    std::string others, ways;
    for (const std::string_view code : known) {
      const size_t to = next(held, code);
      if (to == 0) continue;
      others += escaped(code);
      if (to < codes.size()) ways += " | \"" + escaped(code) + "\" text" + std::to_string(to);
    }
    rules += "text" + std::to_string(held) + " ::= \"\" | [^" + others + "] text0" + ways + "\n";
  }
  return rules;
}

// A schema of texts and null without null.
Json texts_of(Json schema, const Json& root) {
  if (!schema.is_object()) return schema;
  const auto erase = [](Json& list, const auto& is_other) {
    for (size_t i = list.size(); i-- > 0;)
      if (is_other(list[i])) list.erase(i);
  };
  if (schema.contains("type")) schema["type"] = "string";
  if (const auto values = schema.find("enum"); values != schema.end())
    erase(*values, [](const Json& value) { return !value.is_string(); });
  if (const auto choices = schema.find("anyOf"); choices != schema.end()) {
    erase(*choices, [&](const Json& choice) { return types_of(choice, root) == kNull; });
    for (Json& choice : *choices) choice = texts_of(choice, root);
  }
  return schema;
}

// Writes the grammar of calls in one style.
class CallWriter {
 public:
  CallWriter(const CallStyle& style, const Json& tools, const CallRules& how)
      : style_(style), format_(*style.format), notation_(style.notation), tools_(tools), how_(how) {}

  std::string write() {
    if (notation_ == CallNotation::kJson && style_.members.empty()) return "";
    std::string calls;
    for (const Json& tool : tools_) {
      // Only a schema tells the names of nested tags, so that they can match.
      const bool checked = how_.all || is_strict(tool) || notation_ == CallNotation::kNested;
      const std::optional<Json> schema = checked ? std::optional(arguments_schema(tool)) : std::nullopt;
      const auto& called = tool["function"]["name"].get_ref<const std::string&>();
      const std::string name = literal(called);
      std::optional<std::string> call = this->call(name, schema);
      if (!call && how_.all) return "";
      if (!call && is_strict(tool) && (how_.native || notation_ == CallNotation::kNested))
        throw Refusal(
            400, "the strict tool \"" + called + "\" cannot be called in this model's format: " + problem_);
      if (!call) call = this->call(name, std::nullopt);
      calls += (calls.empty() ? "" : " | ") + *call;
    }
    return root() + "call ::= " + calls + "\n" + rules_ +
           "none ::= \"\"\nline ::= \"\\n\"?\nspace ::= \" \"?\ngap ::= space | \"\\n\" [ ]{0,4}\nquote "
           "::= " +
           spell(kGemmaQuote) + "\nnode ::= " + tag() + " \"<\" [^<>/]+ \">\" (text0 | node+) " + tag() +
           " \"</\" [^<>/]+ \">\"\nany ::= [a-zA-Z_] [a-zA-Z0-9_]* \"=\" %json {}\n" +
           text_without(text_end());
  }

 private:
  using Schema = std::optional<Json>;  // nothing: any arguments
  struct Member {
    std::string rule;
    bool needed;
  };

  std::string spell(std::string_view mark) const { return mark.empty() ? "\"\"" : how_.spell(mark); }

  // What is between the marks of the format.
  std::string root() const {
    const bool list = notation_ == CallNotation::kPython || notation_ == CallNotation::kNamed;
    if (notation_ == CallNotation::kJson && style_.list)
      return "root ::= gap \"[\" gap call " + std::string(how_.several ? "(gap \",\" gap call)* " : "") +
             "gap \"]\" gap " + spell(format_.close) + "\n";
    const std::string close = spell(format_.close), again = list ? "\",\" \" \"? call" : "line call",
                      calls = how_.several ? "call (" + again + ")*" : "call";
    if (list) return "root ::= \"[\" " + calls + " \"]\" " + close + "\n";
    if (format_.block) return "root ::= line " + calls + " line " + close + "\n";
    const bool begun =
        (format_.tags && format_.open == format_.tags->call) || notation_ == CallNotation::kRecipient;
    const std::string one = (begun ? "call line " : "line call line ") + close;
    return "root ::= " + one + (how_.several ? " (line " + spell(format_.open) + " " + one + ")*\n" : "\n");
  }

  // The mark that ends texts without escapes.
  std::string_view text_end() const {
    return notation_ == CallNotation::kGemma    ? kGemmaQuote
           : notation_ == CallNotation::kKeys   ? key_tags().value_ends
           : notation_ == CallNotation::kNested ? kTagMark
           : format_.tags                       ? format_.tags->value_ends
                                                : kGemmaQuote;
  }

  // The expression of a call; nothing if its arguments cannot be written.
  std::optional<std::string> call(const std::string& name, const Schema& schema) {
    const std::string json = json_value(schema ? *schema : Json{{"type", "object"}});
    switch (notation_) {
      case CallNotation::kNested:
        return nested(name, schema);
      case CallNotation::kJson:
        return object(name, json);
      case CallNotation::kTags:
        return tagged(name, schema);
      case CallNotation::kJsonInTags:
        return "(" + opened(name) + " " + json + " " + spell(format_.tags->ends) + ")";
      case CallNotation::kKeys:
        return keyed(name, schema);
      case CallNotation::kGemma:
        return "(\"call:\" " + name + " %json(quote, text0) " + json.substr(6) + ")";
      case CallNotation::kPython:
        return python(name, schema);
      case CallNotation::kDeepSeek:
        return "(" + spell(kDeepSeekBegin) + " (" + name + " " + spell(kDeepSeekSeparator) + " " + json +
               " | \"function\" " + spell(kDeepSeekSeparator) + " " + name + " \"\\n```json\\n\" " + json +
               " \"\\n```\") " + spell(kDeepSeekEnd) + ")";
      case CallNotation::kKimi:
        return "(" + spell(kKimiBegin) + " " + literal(kKimiPrefix) + " " + name + " \":\" [0-9]{1,2} " +
               spell(kKimiArguments) + " " + json + " " + spell(kKimiEnd) + ")";
      case CallNotation::kSolar:
        return "(" + spell(kSolarBegin) + " [a-z0-9]{10} " + spell(kSolarName) + " " + name + " " +
               spell(kSolarArguments) + " " + json + " " + spell(kSolarEnd) + ")";
      case CallNotation::kRecipient:
        return "(" + name + " \"\\n\" " + json + ")";
      case CallNotation::kNamed:
        return "(\"{\\\"\" " + name + " \"\\\":\" \" \"? " + json + " \"}\")";
      case CallNotation::kArguments:
        return "(" + name + " (" + spell(kMistralId) + " [a-zA-Z0-9]{9})? " + spell(kMistralArguments) + " " +
               json + ")";
    }
    return std::nullopt;
  }

  // A call in JSON, with the members that the template writes.
  std::string object(const std::string& name, const std::string& arguments) const {
    std::string members;
    for (const CallMember& member : style_.members) {
      const std::string value = member.kind == CallMember::Kind::kArguments ? arguments
                                : member.kind == CallMember::Kind::kName
                                    ? "\"\\\"\" " + name + " \"\\\"\""
                                    : "\"\\\"\" [a-zA-Z0-9]{" + std::to_string(member.length) + "} \"\\\"\"";
      members += (members.empty() ? " " : " space \",\" space ") + literal(literal(member.key)) +
                 " space \":\" space " + value;
    }
    return "(\"{\" space" + members + " space \"}\")";
  }

  // The tag that names the function. The opening mark may be the beginning of it.
  std::string opened(const std::string& name) const {
    const CallTags& tags = *format_.tags;
    return (format_.open == tags.call ? "" : spell(tags.call) + " ") + name + " " + spell(tags.named);
  }

  std::optional<std::string> tagged(const std::string& name, const Schema& schema) {
    const CallTags& tags = *format_.tags;
    const std::string line = tags.lines ? "\"\\n\"" : "line", end = spell(tags.value_ends);
    const auto parameter = [&](const std::string& key, const std::string& value, bool is_text) {
      const std::string type = tags.typed ? literal(is_text ? " string=\"true\">" : " string=\"false\">")
                               : tags.key_ends == "\"" ? "\">\""
                                                       : "\"\"";
      return spell(tags.parameter) + " " + key + " " + literal(tags.key_ends) + " " + type + " " +
             (tags.lines ? line + " " + value + " " + line : value) + " " + end + " " + line;
    };
    const std::optional<std::string> inside = parameters(schema, parameter, "\"<>\n", !tags.typed);
    if (!inside) return std::nullopt;
    return "(" + opened(name) + " " + line + *inside + " " + spell(tags.ends) + ")";
  }

  // Only calls in a block have marks of their own.
  const CallTags& key_tags() const { return format_.block ? *format_.tags : kKeyTags; }

  std::optional<std::string> keyed(const std::string& name, const Schema& schema) {
    const CallTags& tags = key_tags();
    const auto parameter = [&](const std::string& key, const std::string& value, bool) {
      return spell(tags.parameter) + " " + key + " " + spell(tags.key_ends) + " line " + spell(tags.value) +
             " " + value + " " + spell(tags.value_ends) + " line";
    };
    const std::optional<std::string> inside = parameters(schema, parameter, "<\n", true);
    if (!inside) return std::nullopt;
    return "(" + spell(tags.call) + " " + name + " " + spell(tags.named) + " line" + *inside + " " +
           spell(format_.block ? tags.ends : "") + ")";
  }

  // The parameters of a call that stand one after another. `parameter` makes the expression of one.
  // `nullable`: a text may also be null.
  template <typename Parameter>
  std::optional<std::string> parameters(const Schema& schema, const Parameter& parameter,
                                        std::string_view not_in_keys, bool nullable) {
    if (!schema) {
      const std::string key = "[^" + escaped_all(not_in_keys) + "]+";
      return " (" + parameter(key, "text0", true) + ")*";
    }
    const std::optional<Json> members = members_of(*schema);
    if (!members) return cannot("#", "says more than which properties there are");
    std::string inside;
    for (const Json& member : *members) {
      const std::string& key = member["key"].get_ref<const std::string&>();
      const std::string at = "#/properties/" + key;
      if (key.empty() || key.find_first_of(not_in_keys) != std::string::npos)
        return cannot(at, "has a name that cannot be a tag");
      bool is_text = false;
      const std::optional<std::string> value = bare_value(member["schema"], *schema, nullable, is_text, at);
      if (!value) return std::nullopt;
      inside += " (" + parameter(literal(key), *value, is_text) + ")" + (member["needed"] == true ? "" : "?");
    }
    return inside;
  }

  static std::string escaped_all(std::string_view text) {
    std::string out;
    for (const std::string_view code : code_points(text)) out += code == "\n" ? "\\n" : escaped(code);
    return out;
  }

  // MiniMax M3: a tag for each member and each item, with the same mark before all tags.
  std::optional<std::string> nested(const std::string& name, const Schema& schema) {
    referred_.clear();
    root_ = schema ? &*schema : nullptr;
    const std::optional<std::string> inside = schema ? nested_members(*schema, "#") : " node*";
    if (!inside) return std::nullopt;
    return "(" + tag() + " " + literal("<invoke name=\"") + " " + name + " " + literal("\">") + *inside +
           " " + tag() + " \"</invoke>\")";
  }

  std::string tag() const { return spell(kTagMark); }
  std::string in_tag(const std::string& name, const std::string& value) const {
    return "(" + tag() + " " + literal("<" + name + ">") + " " + value + " " + tag() + " " +
           literal("</" + name + ">") + ")";
  }

  std::optional<std::string> cannot(const std::string& path, const char* why) {
    problem_ = path + " " + why;
    return std::nullopt;
  }

  // The members of an object. Null is written by leaving a member out.
  std::optional<std::string> nested_members(const Json& schema, const std::string& path) {
    const std::optional<Json> members = members_of(schema);
    if (!members) return cannot(path, "says more than which properties there are");
    const bool may_be_list = types_of(schema, *root_) == 0;
    std::string inside;
    for (const Json& member : *members) {
      const std::string& key = member["key"].get_ref<const std::string&>();
      const std::string at = path + "/properties/" + key;
      if (key.empty() || key.find_first_of("<>/\n") != std::string::npos || (may_be_list && key == kItem))
        return cannot(at, "has a name that cannot be a tag");
      const Json& property = (*find_field(schema, "properties"))[key];
      const std::optional<std::string> value = nested_value(property, at);
      if (!value) return std::nullopt;
      const bool needed = member["needed"] == true && !allows_null(property);
      inside += " " + in_tag(key, *value) + (needed ? "" : "?");
    }
    return inside;
  }

  // The expression of a tag's content. A part of the schema that references name becomes a rule, because it
  // may contain itself.
  std::optional<std::string> nested_value(const Json& property, const std::string& path) {
    const Json& schema = resolved(property, *root_);
    if (&schema == &property) return nested_part(schema, path);
    const auto [known, is_new] = referred_.try_emplace(&schema, "r" + std::to_string(parts_));
    const std::string rule = known->second;
    if (!is_new) return rule;
    ++parts_;
    const std::optional<std::string> value = nested_part(schema, path);
    if (!value) return std::nullopt;
    rules_ += rule + " ::= " + *value + "\n";
    return rule;
  }

  std::optional<std::string> nested_part(const Json& schema, const std::string& path) {
    if (schema == true || (schema.is_object() && only_has(schema, {}))) return "text0";
    const unsigned types = types_of(schema, *root_);
    if (types == 0) return cannot(path, "does not say its type");
    const Json& given = not_null(schema, *root_);
    switch (types == kNull ? types : types & ~kNull) {
      case kText:
        return nested_text(given, (types & kNull) != 0, path);
      case kArray:
        return nested_items(given, path);
      case kObject:
        if (!find_field(given, "properties") && given.value("additionalProperties", Json(true)) != false)
          return cannot(path, "is an object whose properties are not named");
        return nested_members(given, path);
      default:
        break;
    }
    if (types & (kText | kArray | kObject)) return cannot(path, "allows values of several types");
    const std::optional<Json> value = with_definitions(schema, *root_);
    if (!value) return cannot(path, "refers to something else than definitions");
    return json_value(*value);
  }

  std::optional<std::string> nested_text(const Json& schema, bool or_null, const std::string& path) {
    const std::optional<Json> text = with_definitions(or_null ? texts_of(schema, *root_) : schema, *root_);
    const bool refers = text && or_null && write_json(*text).find("\"$ref\"") != std::string::npos;
    if (!text || refers) return cannot(path, "refers to texts that cannot be told from null");
    return "%json(none, text0) " + write_json(*text);
  }

  std::optional<std::string> nested_items(const Json& schema, const std::string& path) {
    if (!only_has(schema, {"type", "items", "minItems", "maxItems"}))
      return cannot(path, "says more than which items there are");
    const std::optional<std::string> item = nested_value(schema.value("items", Json(true)), path + "/items");
    if (!item) return std::nullopt;
    const Json most = schema.value("maxItems", Json(""));
    return in_tag(std::string(kItem), *item) + "{" + write_json(schema.value("minItems", Json(0))) + "," +
           (most.is_string() ? "" : write_json(most)) + "}";
  }

  // Whether a schema allows null for sure.
  bool allows_null(const Json& property) const {
    const Json& schema = resolved(property, *root_);
    if (!schema.is_object() || (types_of(schema, *root_) & kNull) == 0) return false;
    const Json* choices = find_field(schema, "anyOf");
    if (choices)
      return only_has(schema, {"anyOf"}) &&
             std::any_of(choices->begin(), choices->end(), [&](const Json& c) { return allows_null(c); });
    const Json* values = find_field(schema, "enum");
    return !schema.contains("allOf") && !schema.contains("oneOf") &&
           (!schema.contains("const") || schema["const"].is_null()) &&
           (!values || std::find(values->begin(), values->end(), Json()) != values->end());
  }

  // LFM2: NAME(KEY=VALUE, ...)
  std::optional<std::string> python(const std::string& name, const Schema& schema) {
    if (!schema) return "(" + name + " \"(\" (any (\",\" \" \"? any)*)? \")\")";
    const std::optional<Json> members = members_of(*schema);
    if (!members) return cannot("#", "says more than which properties there are");
    std::vector<Member> all;
    for (const Json& member : *members) {
      const std::string& key = member["key"].get_ref<const std::string&>();
      const std::optional<Json> value = with_definitions(member["schema"], *schema);
      if (key.empty() || key.find_first_of(" \t\r\n<>()[]{}\"'`=,|") != std::string::npos)
        return cannot("#/properties/" + key, "has a name that cannot be a keyword");
      if (!value) return cannot("#/properties/" + key, "refers to something else than definitions");
      all.push_back({literal(key + "=") + " " + json_value(*value), member["needed"] == true});
    }
    return "(" + name + " \"(\" " + listed(all) + " \")\")";
  }

  // Members with commas between them, some of which may be missing. Rule fN is the list from member N on,
  // and rule nN is the same after another member.
  std::string listed(const std::vector<Member>& members) {
    const std::string list = "c" + std::to_string(lists_++);
    for (size_t i = 0; i <= members.size(); ++i)
      for (const char* place : {"f", "n"}) {
        const std::string rest = std::to_string(i + 1), after = list + "n" + rest;
        rules_ += list + place + std::to_string(i) + " ::= ";
        if (i == members.size()) {
          rules_ += "\"\"\n";
          continue;
        }
        rules_ += std::string(place[0] == 'n' ? "\",\" \" \"? " : "") + members[i].rule + " " + after +
                  (members[i].needed ? "" : " | " + list + place + rest) + "\n";
      }
    return list + "f0";
  }

  // The properties of a schema, as {"key", "schema", "needed"}; nothing if it says more than which there are.
  static std::optional<Json> members_of(const Json& schema) {
    const Json none = Json::object(), no_names = Json::array();
    const Json *properties = find_field(schema, "properties"), *required = find_field(schema, "required");
    if (!properties) properties = &none;
    if (!required) required = &no_names;
    if (!only_has(schema, {"type", "properties", "required", "additionalProperties", "$schema", "$defs",
                           "definitions", "strict"}) ||
        !properties->is_object() || !required->is_array())
      return std::nullopt;
    for (const Json& name : *required)
      if (!name.is_string() || !properties->contains(name.get_ref<const std::string&>())) return std::nullopt;
    Json members = Json::array();
    for (const auto& [key, property] : properties->items()) {
      const bool needed = std::find(required->begin(), required->end(), key) != required->end();
      members.push_back({{"key", key}, {"schema", property}, {"needed", needed}});
    }
    return members;
  }

  // A property as a schema of its own; nothing if it refers to something else than definitions.
  static std::optional<Json> with_definitions(const Json& property, const Json& root) {
    if (write_json(property).find("\"$ref\"") == std::string::npos) return property;
    if (!refers_to_definitions(property)) return std::nullopt;
    Json schema = {{"anyOf", Json::array({property})}};
    for (const char* name : kDefinitions) {
      const Json* definitions = find_field(root, name);
      if (!definitions) continue;
      if (!refers_to_definitions(*definitions)) return std::nullopt;
      schema[name] = *definitions;
    }
    return schema;
  }

  // A value that stands without quotes: a text as it is, anything else in JSON. Nothing if it could be read
  // as another value.
  std::optional<std::string> bare_value(const Json& property, const Json& root, bool nullable, bool& is_text,
                                        const std::string& path) {
    const unsigned types = types_of(property, root);
    const std::optional<Json> schema = with_definitions(property, root);
    const bool is_any = property == true || (property.is_object() && only_has(property, {}));
    if (is_any) {
      is_text = true;
      return "text0";
    }
    if (!schema) return cannot(path, "refers to something else than definitions");
    if (types == 0) return cannot(path, "does not say its type");
    if ((types & kText) == 0) return json_value(*schema);
    if ((types & ~(nullable ? kText | kNull : kText)) != 0)
      return cannot(path, "allows values of several types");
    is_text = true;
    return "%json(none, text0) " + write_json(*schema);
  }

  const CallStyle& style_;
  const CallFormat& format_;
  const CallNotation notation_;
  const Json& tools_;
  const CallRules& how_;
  std::string rules_;
  int lists_ = 0, parts_ = 0;
  std::string problem_;  // why the latest tool that cannot be called in this format cannot
  // For a tool whose call is written with nested tags: its schema, and the rules of the parts that references
  // name.
  const Json* root_ = nullptr;
  std::map<const Json*, std::string> referred_;
};

}  // namespace

std::string call_grammar(const CallStyle& style, const Json& tools, const CallRules& rules) {
  return style.format ? CallWriter(style, tools, rules).write() : "";
}

}  // namespace app::serve
