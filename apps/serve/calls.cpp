// Reads the tool calls in a model's answer (see calls.h).
#include "apps/serve/calls.h"

#include <algorithm>
#include <iterator>

#include "apps/serve/call_format.h"
#include "apps/serve/filters.h"
#include "apps/serve/json.h"

namespace app::serve {

namespace {

constexpr size_t npos = std::string_view::npos;
constexpr int kDeepestArgument = 64;  // values are read recursively

std::string json_text(std::string_view text) { return write_json(std::string(text)); }

}  // namespace

// Reads a text from its beginning. Each function removes what it reads, and returns false if the text does
// not go on with it. If that is because the text ends too early, `ended` is set.
struct CallReader {
  std::string_view rest;
  bool last;
  bool ended = false;

  bool ends() {
    ended |= rest.empty();
    return rest.empty();
  }
  void skip_space() { rest.remove_prefix(std::min(rest.find_first_not_of(kJsonSpaces), rest.size())); }
  bool take(std::string_view word) {
    if (rest.starts_with(word)) {
      rest.remove_prefix(word.size());
      return true;
    }
    ended |= word.starts_with(rest);
    return false;
  }
  // Whether the text goes on with this word, which stays.
  bool is_next(std::string_view word) {
    ended |= rest.size() < word.size() && word.starts_with(rest);
    return rest.starts_with(word);
  }
  bool take_until(std::string_view mark, std::string_view& text) {
    const size_t end = rest.find(mark);
    ended |= end == npos;
    if (end == npos) return false;
    text = rest.substr(0, end);
    rest.remove_prefix(end + mark.size());
    return true;
  }
  // The name of a function. The text must go on after it.
  bool take_name(std::string& name) {
    const auto belongs = [](char c) {
      return static_cast<unsigned char>(c) > ' ' && std::string_view("<>()[]{}\"'`=,|").find(c) == npos;
    };
    const auto end = std::find_if_not(rest.begin(), rest.end(), belongs);
    if (end == rest.end()) {
      ended = true;
      return false;
    }
    name.assign(rest.begin(), end);
    rest.remove_prefix(name.size());
    return !name.empty();
  }
  // An object, array or text in JSON, whose texts may contain anything.
  bool take_json(std::string_view& json) {
    size_t depth = 0;
    bool in_text = false;
    for (size_t i = 0; i < rest.size(); ++i) {
      const char c = rest[i];
      if (in_text) {
        if (c == '\\')
          ++i;
        else
          in_text = c != '"';
      } else if (c == '"') {
        in_text = true;
      } else if (c == '{' || c == '[') {
        ++depth;
      } else if (depth == 0) {
        return false;
      } else if (c == '}' || c == ']') {
        --depth;
      }
      if (depth == 0 && !in_text) {
        json = rest.substr(0, i + 1);
        rest.remove_prefix(i + 1);
        return true;
      }
    }
    ended = true;
    return false;
  }
  // The mark that closes calls. A model may end its turn instead.
  bool take_close(std::string_view mark) {
    skip_space();
    return take(mark) || (last && rest.empty());
  }
};

namespace {

// ---- values that are not JSON ----

// A word without quotes as Python or JSON write it: true, None, 1.5. Returns "" for any other word.
std::string json_word(std::string_view word) {
  if (word == "True" || word == "true") return "true";
  if (word == "False" || word == "false") return "false";
  if (word == "None" || word == "null") return "null";
  const bool number =
      !word.empty() && word.size() < 4096 && word.find_first_not_of("0123456789+-.eE") == npos;
  return number && !parse_or_null(word).is_null() ? std::string(word) : "";
}

void append_code_point(uint32_t code, std::string& text) {
  const auto add = [&](uint32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) return add(code);
  if (code < 0x800) {
    add(0xC0 | code >> 6);
  } else if (code < 0x10000) {
    add(0xE0 | code >> 12);
    add(0x80 | (code >> 6 & 63));
  } else {
    add(0xF0 | code >> 18);
    add(0x80 | (code >> 12 & 63));
    add(0x80 | (code >> 6 & 63));
  }
  add(0x80 | (code & 63));
}

// Replaces the escapes of a Python text, and those that only JSON has: \/ and pairs of surrogates.
std::string unescaped(std::string_view written) {
  constexpr std::string_view kNames = "ntrbfav\\'\"0/", kMeant("\n\t\r\b\f\a\v\\'\"\0/", 12);
  std::string text;
  uint32_t high = 0;  // of a pair, if the text before this place is its first half
  for (size_t i = 0; i < written.size(); ++i) {
    const char c = written[i], next = i + 1 < written.size() ? written[i + 1] : '\0';
    const size_t digits = next == 'x' ? 2 : next == 'u' ? 4 : next == 'U' ? 8 : 0;
    if (c != '\\' || i + 1 == written.size()) {
      text += c;
    } else if (digits) {
      const std::string code(written.substr(i + 2, digits));
      const bool valid = code.size() == digits && code.find_first_not_of("0123456789abcdefABCDEF") == npos;
      if (!valid) {
        text += c;
        continue;
      }
      const auto value = std::min<uint32_t>(static_cast<uint32_t>(std::stoul(code, nullptr, 16)), 0x10FFFF);
      i += 1 + digits;
      const bool ends_pair = high != 0 && value >= 0xDC00 && value < 0xE000;
      if (ends_pair) text.resize(text.size() - 3);  // the bytes of the first half
      append_code_point(ends_pair ? 0x10000 + ((high - 0xD800) << 10) + (value - 0xDC00) : value, text);
      const bool begins_pair = value >= 0xD800 && value < 0xDC00 && written.substr(i + 1).starts_with("\\u");
      high = begins_pair ? value : 0;
    } else if (const size_t name = kNames.find(next); name != npos) {
      text += kMeant[name];
      ++i;
    } else {
      text += c;
    }
  }
  return text;
}

// A text in quotes. Templates write texts between quotes without escaping quotes inside, so only a quote that
// something else of a call follows ends the text.
bool python_text(CallReader& in, std::string& json) {
  const char quote = in.rest[0];
  for (size_t i = 1; i < in.rest.size(); ++i) {
    if (in.rest[i] == '\\') {
      ++i;
      continue;
    }
    if (in.rest[i] != quote) continue;
    const size_t next = in.rest.find_first_not_of(kJsonSpaces, i + 1);
    if (next == npos && !in.last) break;
    if (next != npos && std::string_view(",)]}:").find(in.rest[next]) == npos) continue;
    json += json_text(unescaped(in.rest.substr(1, i - 1)));
    in.rest.remove_prefix(i + 1);
    return true;
  }
  in.ended = true;
  return false;
}

// Reads a value as Python writes it, and adds its JSON.
bool python_value(CallReader& in, std::string& json, int depth) {
  in.skip_space();
  if (depth > kDeepestArgument || in.ends()) return false;
  const char first = in.rest[0];
  if (first == '"' || first == '\'') return python_text(in, json);
  if (first == '{' || first == '[' || first == '(') {
    const char close = first == '{' ? '}' : first == '[' ? ']' : ')';
    in.rest.remove_prefix(1);
    json += first == '{' ? '{' : '[';
    for (bool any = false;; any = true) {
      in.skip_space();
      if (in.ends()) return false;
      if (in.rest[0] == close) break;
      if (any) json += ',';
      if (first == '{') {
        if (in.rest[0] != '"' && in.rest[0] != '\'') return false;
        if (!python_text(in, json)) return false;
        in.skip_space();
        if (!in.take(":")) return false;
        json += ':';
      }
      if (!python_value(in, json, depth + 1)) return false;
      in.skip_space();
      if (in.ends()) return false;
      if (in.rest[0] != close && !in.take(",")) return false;
    }
    in.rest.remove_prefix(1);
    json += first == '{' ? '}' : ']';
    return true;
  }
  const size_t end = in.rest.find_first_of(",)]}: \n\r\t");
  if (end == npos && !in.last) {
    in.ended = true;
    return false;
  }
  const std::string word = json_word(in.rest.substr(0, end));
  in.rest.remove_prefix(std::min(end, in.rest.size()));
  json += word;
  return !word.empty();
}

// Gemma 4 writes texts between marks, and names without quotes.
bool gemma_text(CallReader& in, std::string& json) {
  std::string_view text;
  if (!in.take_until(kGemmaQuote, text)) return false;
  json += json_text(text);
  return true;
}

bool gemma_value(CallReader& in, std::string& json, int depth);

// The rest of an object after its brace.
bool gemma_members(CallReader& in, std::string& json, int depth) {
  json += '{';
  for (bool any = false;; any = true) {
    in.skip_space();
    if (in.take("}")) break;
    if (in.ends()) return false;
    if (any && !in.take(",")) return false;
    if (any) json += ',';
    in.skip_space();
    if (in.take(kGemmaQuote)) {
      if (!gemma_text(in, json)) return false;
    } else {
      const size_t end = in.rest.find_first_of(":,{}[]");
      in.ended |= end == npos;
      if (end == npos || in.rest[end] != ':') return false;
      json += json_text(stripped(in.rest.substr(0, end)));
      in.rest.remove_prefix(end);
    }
    in.skip_space();
    if (!in.take(":") || !gemma_value(in, json += ':', depth + 1)) return false;
  }
  json += '}';
  return true;
}

bool gemma_value(CallReader& in, std::string& json, int depth) {
  in.skip_space();
  if (depth > kDeepestArgument || in.ends()) return false;
  if (in.take(kGemmaQuote)) return gemma_text(in, json);
  if (in.take("{")) return gemma_members(in, json, depth);
  if (in.take("[")) {
    json += '[';
    for (bool any = false;; any = true) {
      in.skip_space();
      if (in.take("]")) break;
      if (any && !in.take(",")) return false;
      if (any) json += ',';
      if (!gemma_value(in, json, depth + 1)) return false;
    }
    json += ']';
    return true;
  }
  // A word up to the next value. If it is not a number or the like, it is a text that lacks its quotes.
  const size_t end = in.rest.find_first_of(",}]");
  in.ended |= end == npos;
  if (end == npos || end == 0) return false;
  const std::string_view word = stripped(in.rest.substr(0, end));
  const std::string known = json_word(word);
  json += known.empty() ? json_text(word) : known;
  in.rest.remove_prefix(end);
  return true;
}

}  // namespace

// ---- formats ----

namespace {

constexpr CallTags kFunctionTags = {"<function=",   ">", "</function>", "<parameter=", ">",
                                    "</parameter>", true};
constexpr CallTags kInvokeTags = {"<invoke name=\"",    "\">", "</invoke>",
                                  "<parameter name=\"", "\"",  "</parameter>"};
constexpr CallTags kDsmlTags = {"<\uff5cDSML\uff5cinvoke name=\"",
                                "\">",
                                "</\uff5cDSML\uff5cinvoke>",
                                "<\uff5cDSML\uff5cparameter name=\"",
                                "\"",
                                "</\uff5cDSML\uff5cparameter>",
                                false,
                                true};
constexpr CallTags kParamTags = {"<function name=\"", "\">", "</function>",
                                 "<param name=\"",    "\"",  "</param>"};

// The JSON of a value that was written without quotes. `types`: those that it may have; 0: any.
std::string typed_json(unsigned types, std::string_view written);

// The text of a member of an object in compact JSON, in which numbers stay as they were written.
std::string_view member(std::string_view object, const std::string& name) {
  std::string_view found;
  for (size_t at = 1; at < object.size() && object[at] == '"';) {
    const size_t colon = json_value_end(object, at), end = json_value_end(object, colon + 1);
    if (object.substr(at, colon - at) == "\"" + name + "\"")
      found = object.substr(colon + 1, end - colon - 1);
    at = end + 1;
  }
  return found;
}

// Adds a call. Returns false if its arguments are not an object.
bool add_call(std::string_view name, std::string_view arguments, std::vector<ToolCall>& calls) {
  std::string object = arguments_json(compact_json(arguments));
  if (name.empty() || object.empty()) return false;
  calls.push_back({std::string(name), std::move(object)});
  return true;
}

// Objects or arrays of calls in JSON.
bool read_json(CallReader& in, const CallFormat& format, const ToolTypes&, std::vector<ToolCall>& calls) {
  do {
    in.skip_space();
    std::string_view json;
    if (in.rest.starts_with('"') || !in.take_json(json) || !read_json_calls(json, false, calls)) return false;
    if (format.close.empty()) return true;
    in.skip_space();
  } while (in.rest.starts_with('{'));
  return in.take_close(format.close);
}

// The value of a parameter, which may contain the tag that ends it: the value ends where the call goes on
// after the tag. If it is an object or array, it may even contain how a call goes on, in quotes.
bool take_tagged_value(CallReader& in, const CallTags& tags, std::string_view close, bool may_be_text,
                       std::string_view& value) {
  if (CallReader json = in; !may_be_text) {
    json.skip_space();
    std::string_view ignored;
    if ((json.is_next("{") || json.is_next("[")) && json.take_json(ignored)) {
      json.skip_space();
      const size_t size = in.rest.size() - json.rest.size();
      if (json.take(tags.value_ends)) {
        value = in.rest.substr(0, size);
        in.rest = json.rest;
        in.skip_space();
        return true;
      }
    }
    if (json.ended && !in.last) {
      in.ended = true;
      return false;
    }
  }
  for (size_t end = 0; (end = in.rest.find(tags.value_ends, end)) != npos; ++end) {
    CallReader after{in.rest.substr(end + tags.value_ends.size()), in.last};
    after.skip_space();
    const std::string_view next = after.rest;
    if (after.take(tags.parameter) || after.take(tags.ends) || (!close.empty() && after.take(close))) {
      value = in.rest.substr(0, end);
      in.rest = next;
      return true;
    }
    if (after.ended) break;
  }
  in.ended = true;
  return false;
}

// The rest of a call after its first tag.
bool read_tagged(CallReader& in, const CallFormat& format, const ToolTypes& types,
                 std::vector<ToolCall>& calls) {
  const CallTags& tags = *format.tags;
  std::string name, object = "{";
  if (!in.take_name(name) || !in.take(tags.named)) return false;
  in.skip_space();
  if (std::string_view json; in.rest.starts_with('{')) {  // Functionary writes JSON instead of parameters
    if (!in.take_json(json)) return false;
    in.skip_space();
    return in.take(tags.ends) && add_call(name, json, calls);
  }
  for (; !in.take(tags.ends); in.skip_space()) {
    if (!format.close.empty() && in.is_next(format.close)) break;  // some models leave the tag out
    std::string_view key, how, value;
    if (!in.take(tags.parameter) || !in.take_until(tags.key_ends, key)) return false;
    if (tags.key_ends == "\"" && !in.take_until(">", how)) return false;
    if (!take_tagged_value(in, tags, format.close, types.may_be_text(name, key), value)) return false;
    constexpr std::string_view kData = "<![CDATA[", kDataEnds = "]]>";
    if (value.starts_with(kData) && value.ends_with(kDataEnds)) {
      value = value.substr(kData.size(), value.size() - kData.size() - kDataEnds.size());
    } else if (tags.lines) {
      if (value.starts_with('\n')) value.remove_prefix(1);
      if (value.ends_with('\n')) value.remove_suffix(1);
    }
    object += (object.size() > 1 ? "," : "") + json_text(key) + ":";
    object += how.find("string=\"true\"") != npos ? json_text(value) : types.json(name, key, value);
  }
  return add_call(name, object + "}", calls);
}

// Calls in tags between the marks.
bool read_tagged_block(CallReader& in, const CallFormat& format, const ToolTypes& types,
                       std::vector<ToolCall>& calls) {
  do {
    in.skip_space();
    if (!in.take(format.tags->call) || !read_tagged(in, format, types, calls)) return false;
    in.skip_space();
  } while (in.is_next(format.tags->call));
  return in.take_close(format.close);
}

// Qwen's models at times write a call without its opening mark.
bool read_lone_tagged(CallReader& in, const CallFormat& format, const ToolTypes& types,
                      std::vector<ToolCall>& calls) {
  if (!read_tagged(in, format, types, calls)) return false;
  CallReader after = in;
  after.skip_space();
  if (after.take("</tool_call>")) in.rest = after.rest;
  in.ended |= after.ended;
  return !after.ended || in.last;
}

// <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>..., the arguments of a function.
bool read_key_values(CallReader& in, const CallTags& tags, const std::string& name, const ToolTypes& types,
                     std::string& object) {
  object = "{";
  for (in.skip_space(); in.take(tags.parameter); in.skip_space()) {
    std::string_view key, value;
    if (!in.take_until(tags.key_ends, key)) return false;
    in.skip_space();
    if (!in.take(tags.value)) return false;
    if (!take_tagged_value(in, tags, {}, types.may_be_text(name, key), value)) return false;
    object += (object.size() > 1 ? "," : "") + json_text(key) + ":" + types.json(name, key, value);
  }
  object += "}";
  return true;
}

// GLM: NAME and its keys and values.
bool read_keys(CallReader& in, const CallFormat& format, const ToolTypes& types,
               std::vector<ToolCall>& calls) {
  std::string name, object;
  if (!in.take_name(name) || !read_key_values(in, kKeyTags, name, types, object)) return false;
  if (object == "{}" && !types.has(name)) return false;  // a word alone need not be a function
  return in.take_close(format.close) && add_call(name, object, calls);
}

// Hy3: the same, each call between marks of its own.
bool read_key_block(CallReader& in, const CallFormat& format, const ToolTypes& types,
                    std::vector<ToolCall>& calls) {
  const CallTags& tags = *format.tags;
  do {
    std::string name, object;
    in.skip_space();
    if (!in.take(tags.call) || !in.take_name(name) || !in.take(tags.named)) return false;
    if (!read_key_values(in, tags, name, types, object) || !in.take(tags.ends)) return false;
    if (!add_call(name, object, calls)) return false;
    in.skip_space();
  } while (in.is_next(tags.call));
  return in.take_close(format.close);
}

// What is between <tool_call> and </tool_call> depends on the model.
bool read_tool_call(CallReader& in, const CallFormat& format, const ToolTypes& types,
                    std::vector<ToolCall>& calls) {
  in.skip_space();
  if (in.ends()) return false;
  if (in.rest[0] == '{' || in.rest[0] == '[') return read_json(in, format, types, calls);
  return in.rest[0] == '<' ? read_tagged_block(in, format, types, calls)
                           : read_keys(in, format, types, calls);
}

// Gemma 4: call:NAME{KEY:VALUE,...}
bool read_gemma(CallReader& in, const CallFormat& format, const ToolTypes&, std::vector<ToolCall>& calls) {
  std::string name, object;
  in.skip_space();
  return in.take("call:") && in.take_name(name) && in.take("{") && gemma_members(in, object, 0) &&
         in.take_close(format.close) && add_call(name, object, calls);
}

// LFM2: [NAME(KEY=VALUE, ...), ...], or JSON.
bool read_python(CallReader& in, const CallFormat& format, const ToolTypes& types,
                 std::vector<ToolCall>& calls) {
  in.skip_space();
  CallReader inside = in;
  if (inside.take("[")) {
    inside.skip_space();
    if (inside.rest.starts_with('{')) return read_json(in, format, types, calls);
  }
  if (inside.ends() || in.rest.starts_with('{')) return read_json(in, format, types, calls);
  const bool list = in.take("[");
  for (bool any = false; !any || in.take(","); any = true) {
    std::string name, key, object = "{";
    in.skip_space();
    if (!in.take_name(name) || !in.take("(")) return false;
    for (in.skip_space(); !in.take(")"); in.skip_space()) {
      if (object.size() > 1 && !in.take(",")) return false;
      in.skip_space();
      if (!in.take_name(key)) return false;
      in.skip_space();
      object += (object.size() > 1 ? "," : "") + json_text(key) + ":";
      if (!in.take("=") || !python_value(in, object, 0)) return false;
    }
    if (!add_call(name, object + "}", calls)) return false;
    in.skip_space();
  }
  if (list && !in.take("]")) return false;
  return in.take_close(format.close);
}

// DeepSeek: each call is NAME, a separator, and its arguments. Older models write "function" before the
// separator, and then the name and a block of JSON.
bool read_deepseek(CallReader& in, const CallFormat& format, const ToolTypes&, std::vector<ToolCall>& calls) {
  do {
    std::string_view name, json;
    in.skip_space();
    if (!in.take(kDeepSeekBegin) || !in.take_until(kDeepSeekSeparator, name)) return false;
    in.skip_space();
    if (in.ends()) return false;
    const bool block = in.rest[0] != '{';
    if (block && (!in.take_until("\n", name) || !in.take("```json"))) return false;
    in.skip_space();
    if (!in.take_json(json)) return false;
    in.skip_space();
    if ((block && !in.take("```")) || !in.take(kDeepSeekEnd) || !add_call(stripped(name), json, calls))
      return false;
    in.skip_space();
  } while (in.is_next(kDeepSeekBegin));
  return in.take_close(format.close);
}

// Kimi K2: each call is functions.NAME:NUMBER and its arguments.
bool read_kimi(CallReader& in, const CallFormat& format, const ToolTypes&, std::vector<ToolCall>& calls) {
  do {
    std::string_view id, json;
    in.skip_space();
    if (!in.take(kKimiBegin) || !in.take_until(kKimiArguments, id)) return false;
    in.skip_space();
    if (!in.take_json(json)) return false;
    in.skip_space();
    id = stripped(id);
    if (id.starts_with(kKimiPrefix)) id.remove_prefix(kKimiPrefix.size());
    if (!in.take(kKimiEnd) || !add_call(id.substr(0, id.rfind(':')), json, calls)) return false;
    in.skip_space();
  } while (in.is_next(kKimiBegin));
  return in.take_close(format.close);
}

// Solar Open: each call is an id, a name and its arguments.
bool read_solar(CallReader& in, const CallFormat& format, const ToolTypes&, std::vector<ToolCall>& calls) {
  do {
    std::string_view id, name, json;
    in.skip_space();
    if (!in.take(kSolarBegin) || !in.take_until(kSolarName, id) || !in.take_until(kSolarArguments, name))
      return false;
    in.skip_space();
    if (!in.take_json(json)) return false;
    in.skip_space();
    if (!in.take(kSolarEnd) || !add_call(stripped(name), json, calls)) return false;
    in.skip_space();
  } while (in.is_next(kSolarBegin));
  return in.take_close(format.close);
}

// Functionary 3.2: NAME, a line break and the arguments. Other texts may have the mark, so only a known tool
// is called.
bool read_recipient(CallReader& in, const CallFormat&, const ToolTypes& types, std::vector<ToolCall>& calls) {
  std::string name;
  std::string_view json;
  if (!in.take_name(name) || !types.has(name) || !in.take("\n")) return false;
  in.skip_space();
  return in.take_json(json) && add_call(name, json, calls);
}

// The part of a schema for a member of an object, or for the items of an array (`key` is null).
const Json& part_of(const Json& schema, const Json& root, const std::string* key) {
  static const Json none;
  if (!schema.is_object()) return none;
  const Json* parts = find_field(schema, key ? "properties" : "items");
  const Json* part = parts && key && parts->is_object() ? find_field(*parts, key->c_str()) : parts;
  if (part) return resolved(*part, root);
  for (const char* name : {"anyOf", "oneOf"})
    if (const Json* choices = find_field(schema, name); choices && choices->is_array())
      for (const Json& choice : *choices)
        if (const Json& found = part_of(resolved(choice, root), root, key); !found.is_null()) return found;
  return none;
}

// The object with these members. Null is written by leaving a member out.
std::string nested_object(std::vector<std::string> names, std::vector<std::string> values, const Json& schema,
                          const Json& root) {
  const Json& given = not_null(schema, root);
  const Json* required = given.is_object() ? find_field(given, "required") : nullptr;
  if (required && required->is_array())
    for (const Json& needed : *required) {
      if (!needed.is_string()) continue;
      const auto& name = needed.get_ref<const std::string&>();
      if (std::find(names.begin(), names.end(), name) != names.end()) continue;
      if ((types_of(part_of(given, root, &name), root) & kNull) == 0) continue;
      names.push_back(name);
      values.emplace_back("null");
    }
  std::string json = "{";
  for (size_t i = 0; i < names.size(); ++i) json += (i ? "," : "") + json_text(names[i]) + ":" + values[i];
  return json + "}";
}

bool read_nested(CallReader& in, std::string_view key, const Json& schema, const Json& root,
                 std::string& json, int depth);

// The tags in a tag, up to the one that closes it, as an object or an array.
bool read_children(CallReader& in, std::string_view key, const Json& schema, const Json& root,
                   std::string& json, int depth) {
  const unsigned types = schema.is_object() ? types_of(schema, root) : 0;
  std::vector<std::string> names, values;
  const std::string close = "</" + std::string(key) + ">";
  const bool may_be_list = types == 0 || (types & kArray) != 0;
  while (!in.take(close)) {
    std::string_view name;
    if (!in.take("<") || !in.take_until(">", name) || name.empty()) return false;
    const std::string member(name);
    const bool item = may_be_list && name == kItem;
    values.emplace_back();
    if (!read_nested(in, name, part_of(schema, root, item ? nullptr : &member), root, values.back(), depth))
      return false;
    names.push_back(member);
    in.skip_space();
    if (!in.take(kTagMark)) return false;
  }
  const bool all_items = std::all_of(names.begin(), names.end(), [](const auto& n) { return n == kItem; });
  if (!may_be_list || names.empty() || !all_items) {
    json += nested_object(std::move(names), std::move(values), schema, root);
    return true;
  }
  for (size_t i = 0; i < values.size(); ++i) json += (i ? "," : "[") + values[i];
  json += ']';
  return true;
}

// What is in a tag: other tags, or a text whose type the schema names.
bool read_nested(CallReader& in, std::string_view key, const Json& schema, const Json& root,
                 std::string& json, int depth) {
  std::string_view text;
  if (depth > kDeepestArgument || !in.take_until(kTagMark, text)) return false;
  if (in.is_next("<") && !in.is_next("</"))
    return stripped(text).empty() && read_children(in, key, schema, root, json, depth + 1);
  if (in.ended || !in.take("</" + std::string(key) + ">")) return false;
  unsigned types = schema.is_object() ? types_of(schema, root) : 0;
  if (types & kText) types &= ~unsigned{kNull};  // the word null is a text
  const bool nothing = text.empty() && types != 0 && (types & kText) == 0;
  json += !nothing          ? typed_json(types, text)
          : types & kArray  ? "[]"
          : types & kObject ? nested_object({}, {}, schema, root)
                            : "null";
  return true;
}

// MiniMax M3: <invoke name="NAME"> and a tag for each parameter, in which objects and arrays are tags, too.
bool read_nested_block(CallReader& in, const CallFormat& format, const ToolTypes& types,
                       std::vector<ToolCall>& calls) {
  const std::string begin = std::string(kTagMark) + "<invoke name=\"";
  do {
    in.skip_space();
    std::string_view name;
    std::string object;
    if (!in.take(begin) || !in.take_until("\">", name)) return false;
    in.skip_space();
    const Json& schema = types.schema(name);
    if (!in.take(kTagMark) || !read_children(in, "invoke", schema, schema, object, 0)) return false;
    if (object == "[]") object = "{}";
    if (!add_call(name, object, calls)) return false;
    in.skip_space();
  } while (in.is_next(begin));
  return in.take_close(format.close);
}

// Apertus: a list of objects {NAME: {...}}.
bool read_named(CallReader& in, const CallFormat& format, const ToolTypes&, std::vector<ToolCall>& calls) {
  std::string_view list;
  in.skip_space();
  if (!in.is_next("[") || !in.take_json(list)) return false;
  const std::string json = compact_json(list);
  if (!parse_or_null(json).is_array()) return false;
  for (size_t at = 1; at + 1 < json.size();) {
    const size_t end = json_value_end(json, at);
    const std::string_view one = std::string_view(json).substr(at, end - at);
    const Json call = parse_or_null(one);
    if (!call.is_object() || call.size() != 1) return false;
    const std::string name = call.begin().key();
    if (!add_call(name, member(one, name), calls)) return false;
    at = end + 1;
  }
  return !calls.empty() && in.take_close(format.close);
}

// Mistral: an array in JSON, or NAME[ARGS]{...}.
bool read_mistral(CallReader& in, const CallFormat& format, const ToolTypes& types,
                  std::vector<ToolCall>& calls) {
  in.skip_space();
  if (in.ends()) return false;
  if (in.rest[0] == '[' || in.rest[0] == '{') return read_json(in, format, types, calls);
  std::string name;
  std::string_view json, id;
  if (!in.take_name(name)) return false;
  if (in.take(kMistralId) ? !in.take_until(kMistralArguments, id) : !in.take(kMistralArguments)) return false;
  in.skip_space();
  return in.take_json(json) && add_call(name, json, calls);
}

using enum CallNotation;
constexpr CallFormat kFormats[] = {
    {"<tool_call>", "</tool_call>", read_tool_call, kJson, &kFunctionTags},
    {"<seed:tool_call>", "</seed:tool_call>", read_tagged_block, kTags, &kFunctionTags, true},
    {"<function=", "", read_lone_tagged, kTags, &kFunctionTags},
    {"<function name=\"", "", read_tagged, kTags, &kParamTags},
    {"<minimax:tool_call>", "</minimax:tool_call>", read_tagged_block, kTags, &kInvokeTags, true},
    {"<\uff5cDSML\uff5cfunction_calls>", "</\uff5cDSML\uff5cfunction_calls>", read_tagged_block, kTags,
     &kDsmlTags, true},
    {"<\uff5cDSML\uff5ctool_calls>", "</\uff5cDSML\uff5ctool_calls>", read_tagged_block, kTags, &kDsmlTags,
     true},
    {"<|tool_call>", "<tool_call|>", read_gemma, kGemma},
    {"<|tool_call_start|>", "<|tool_call_end|>", read_python, kPython},
    {"<TOOLCALL>", "</TOOLCALL>", read_json},
    {"<|START_ACTION|>", "<|END_ACTION|>", read_json},
    {"<|tool_call|>", "", read_json},
    {"function call<|role_sep|>", "", read_json},
    {"[TOOL_CALLS]", "", read_mistral},
    {"<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>", read_deepseek,
     kDeepSeek, nullptr, true},
    {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", read_kimi, kKimi, nullptr, true},
    {"<tool_calls:opensource>", "</tool_calls:opensource>", read_key_block, kKeys, &kHyTags, true},
    {"<|tool_calls|>", "<|calls|>", read_solar, kSolar, nullptr, true},
    {"<|tools_prefix|>", "<|tools_suffix|>", read_named, kNamed},
    {kRecipientMark, "", read_recipient, kRecipient},
    {kNestedOpen, kNestedClose, read_nested_block, kNested, nullptr, true},
};

// Tokens inside calls.
constexpr std::string_view kInnerMarks[] = {
    kGemmaQuote,       kKeyTags.parameter, kKeyTags.key_ends,  kKeyTags.value,    kKeyTags.value_ends,
    kHyTags.call,      kHyTags.named,      kHyTags.ends,       kHyTags.parameter, kHyTags.key_ends,
    kHyTags.value,     kHyTags.value_ends, "\uff5cDSML\uff5c", kDeepSeekBegin,    kDeepSeekSeparator,
    kDeepSeekEnd,      kKimiBegin,         kKimiArguments,     kKimiEnd,          kSolarBegin,
    kSolarName,        kSolarArguments,    kSolarEnd,          "<|role_sep|>",    kMistralId,
    kMistralArguments, kTagMark,
};

// Reads {"name": ..., "arguments": {...}} in compact JSON. Llama writes "parameters" for arguments, Cohere
// also "tool_name", and the whole may be the "function" of another object. An object whose arguments have yet
// another name is not a call, because a call without them would do something else.
bool read_json_call(const std::string& text, bool bare, std::vector<ToolCall>& calls) {
  const Json whole = parse_or_null(text);
  if (!whole.is_object()) return false;
  const Json* function = find_field(whole, "function");
  const bool wrapped = function && function->is_object();
  const Json& fields = wrapped ? *function : whole;
  const std::string_view object = wrapped ? member(text, "function") : std::string_view(text);
  const Json* name = find_field(fields, "name");
  if (!name) name = find_field(fields, "tool_name");
  if (!name || !name->is_string() || name->get_ref<const std::string&>().empty()) return false;
  const bool arguments = fields.contains("arguments"), parameters = fields.contains("parameters");
  if (bare && !arguments && !parameters) return false;
  constexpr std::string_view kOthers[] = {"name", "id", "type", "tool_name", "tool_call_id"};
  for (const auto& [key, value] : fields.items())
    if (!arguments && !parameters &&
        std::find(std::begin(kOthers), std::end(kOthers), key) == std::end(kOthers))
      return false;
  const std::string_view given = member(object, arguments ? "arguments" : "parameters");
  // The name of the arguments is written with escapes.
  if (given.empty() && (arguments || parameters)) return false;
  std::string read = arguments_json(given);
  if (read.empty()) return false;
  calls.push_back({*name, std::move(read)});
  return true;
}

unsigned type_of(const Json& value) {
  return value.is_string()                                ? kText
         : value.is_number_integer() || value.is_binary() ? kInteger | kNumber
         : value.is_number()                              ? kNumber
         : value.is_boolean()                             ? kBoolean
         : value.is_object()                              ? kObject
         : value.is_array()                               ? kArray
                                                          : kNull;
}

unsigned named_type(const Json& name) {
  constexpr std::pair<const char*, unsigned> kNames[] = {
      {"string", kText},     {"integer", kInteger}, {"number", kNumber | kInteger},
      {"boolean", kBoolean}, {"object", kObject},   {"array", kArray},
      {"null", kNull}};
  for (const auto& [known, type] : kNames)
    if (name == known) return type;
  return 0;
}

// The part of a schema that a reference "#/a/b" names, or null.
const Json* referred(const Json& root, const std::string& reference) {
  if (!reference.starts_with('#')) return nullptr;
  try {
    return &root.at(Json::json_pointer(reference.substr(1)));
  } catch (const Json::exception&) {
    return nullptr;
  }
}

unsigned types_of(const Json& schema, const Json& root, int depth) {
  unsigned types = 0;
  if (!schema.is_object() || depth > 8) return types;
  if (const Json* reference = find_field(schema, "$ref"); reference && reference->is_string()) {
    const Json* target = referred(root, reference->get_ref<const std::string&>());
    return target ? types_of(*target, root, depth + 1) : 0;
  }
  const Json* type = find_field(schema, "type");
  if (type && type->is_array()) {
    for (const Json& one : *type) types |= named_type(one);
  } else if (type) {
    types = named_type(*type);
  }
  if (types) return types;
  if (const Json* values = find_field(schema, "enum"); values && values->is_array())
    for (const Json& value : *values) types |= type_of(value);
  if (const auto value = schema.find("const"); value != schema.end()) types |= type_of(*value);
  for (const char* name : {"anyOf", "oneOf", "allOf"})
    if (const Json* choices = find_field(schema, name); choices && choices->is_array())
      for (const Json& choice : *choices) types |= types_of(choice, root, depth + 1);
  return types;
}

}  // namespace

unsigned types_of(const Json& schema, const Json& root) { return types_of(schema, root, 0); }

const Json& resolved(const Json& schema, const Json& root) {
  const Json* found = &schema;
  for (int steps = 0; found->is_object() && steps < 8; ++steps) {
    const Json* reference = find_field(*found, "$ref");
    if (!reference || !reference->is_string()) break;
    const Json* target = referred(root, reference->get_ref<const std::string&>());
    if (!target) break;
    found = target;
  }
  return *found;
}

const Json& not_null(const Json& schema, const Json& root) {
  const Json* only = nullptr;
  const Json* choices = schema.is_object() ? find_field(schema, "anyOf") : nullptr;
  if (!choices || !choices->is_array()) return schema;
  for (const Json& choice : *choices) {
    if (types_of(choice, root) == kNull) continue;
    if (only) return schema;
    only = &choice;
  }
  return only ? resolved(*only, root) : schema;
}

ToolTypes::ToolTypes(const Json& tools) {
  for (const Json& tool : tools) {
    const Json* function = tool.is_object() ? find_field(tool, "function") : nullptr;
    const Json* name = function && function->is_object() ? find_field(*function, "name") : nullptr;
    if (!name || !name->is_string()) continue;
    Parameters& parameters = tools_[name->get<std::string>()];
    const Json* schema = find_field(*function, "parameters");
    const Json* properties = schema && schema->is_object() ? find_field(*schema, "properties") : nullptr;
    if (!properties || !properties->is_object()) continue;
    for (const auto& [key, property] : properties->items()) parameters[key] = types_of(property, *schema);
    schemas_[name->get<std::string>()] = std::make_shared<const Json>(*schema);
  }
}

unsigned ToolTypes::types(std::string_view tool, std::string_view parameter) const {
  const auto found = tools_.find(tool);
  if (found == tools_.end()) return 0;
  const auto known = found->second.find(parameter);
  return known == found->second.end() ? 0 : known->second;
}

bool ToolTypes::may_be_text(std::string_view tool, std::string_view parameter) const {
  const unsigned types = this->types(tool, parameter);
  return types == 0 || (types & kText) != 0;
}

const Json& ToolTypes::schema(std::string_view tool) const {
  static const Json none;
  const auto found = schemas_.find(tool);
  return found == schemas_.end() ? none : *found->second;
}

std::string ToolTypes::json(std::string_view tool, std::string_view parameter,
                            std::string_view written) const {
  return typed_json(types(tool, parameter), written);
}

namespace {

std::string typed_json(unsigned types, std::string_view written) {
  const std::string_view word = stripped(written);
  std::string value = types == kText ? "" : json_word(word);
  if (types != kText && (word.starts_with('{') || word.starts_with('['))) {
    value = compact_json(word);
    if (parse_or_null(value).is_null()) {  // an object as Python prints it
      CallReader in{word, true};
      value.clear();
      if (!python_value(in, value, 0) || !in.rest.empty()) value.clear();
    }
  }
  if (value.empty()) return json_text(written);
  const unsigned type = type_of(parse_or_null(value));
  return types == 0 || (types & type) != 0 || (types & kText) == 0 ? value : json_text(written);
}

// Whether a prompt shows calls that begin in this way after <tool_call>.
bool shows_calls(std::string_view prompt, std::string_view begin) {
  constexpr std::string_view kMark = "<tool_call>";
  for (size_t at = prompt.find(kMark); at != npos; at = prompt.find(kMark, at + 1))
    if (stripped(prompt.substr(at + kMark.size())).starts_with(begin)) return true;
  return false;
}

}  // namespace

namespace {

// Sets the members of calls from one that a template wrote.
void find_members(std::string_view written, CallStyle& style) {
  CallReader in{written, true};
  std::string_view json;
  if (!in.take_json(json)) return;
  const Json whole = parse_or_null(compact_json(json));
  style.list = whole.is_array() && !whole.empty();
  const Json& call = style.list ? whole[0] : whole;
  if (!call.is_object()) return;
  using enum CallMember::Kind;
  size_t names = 0, arguments = 0;
  for (const auto& [key, value] : call.items()) {
    const bool named = key == "name" || key == "tool_name", given = key == "arguments" || key == "parameters";
    names += named ? 1 : 0;
    arguments += given ? 1 : 0;
    if (given ? !value.is_object() : !value.is_string()) names = 2;  // written in another way
    const size_t length = value.is_string() ? value.get_ref<const std::string&>().size() : 0;
    style.members.push_back({named ? kName : given ? kArguments : kId, key, length});
  }
  if (names != 1 || arguments != 1) style.members.clear();
}

}  // namespace

CallStyle mentioned_calls(std::string_view prompt) {
  constexpr std::string_view kMark = "<|tool_call|>";
  if (prompt.find(kMark) == npos) return {};
  CallStyle style = {find_open_mark(kMark).format};
  find_members(R"([{"name": "", "arguments": {}}])", style);
  return style;
}

std::string call_mark(std::string_view prompt) {
  return shows_calls(prompt, "{\"name\"") ? "<tool_call>\n" : "";
}

CallStyle described_calls(std::string_view prompt) {
  const CallFormat* format = find_open_mark("<tool_call>").format;
  if (shows_calls(prompt, "{\"name\"")) return {format, CallNotation::kJson};
  if (shows_calls(prompt, "<function=")) return {format, CallNotation::kTags};
  return {};
}

CallStyle written_calls(std::string_view text) {
  const OpenMark mark = find_open_mark(text);
  if (!mark.format) return {};
  std::string_view inside = stripped(text.substr(mark.at + mark.mark.size()));
  const auto begins = [&](std::string_view word) { return inside.starts_with(word); };
  CallStyle style = {mark.format, mark.format->notation};
  if (style.notation == CallNotation::kNamed) return style;
  if (begins("{") || (begins("[") && mark.format->read != read_python)) {
    style.notation = CallNotation::kJson;
    find_members(inside, style);
  } else if (mark.format->read == read_mistral) {
    style.notation = CallNotation::kArguments;
  } else if (mark.format->read == read_tool_call) {
    style.notation = begins("<") ? CallNotation::kTags : CallNotation::kKeys;
  } else if (mark.format->read == read_lone_tagged) {
    inside.remove_prefix(std::min(inside.find('>') + 1, inside.size()));
    if (begins("{")) style.notation = CallNotation::kJsonInTags;
  }
  return style;
}

std::vector<const CallFormat*> call_formats() {
  std::vector<const CallFormat*> all;
  for (const CallFormat& format : kFormats) all.push_back(&format);
  return all;
}

std::string_view open_mark(const CallFormat& format) { return format.open; }
CallNotation usual_notation(const CallFormat& format) { return format.notation; }

void describe_tools(const Json& tools, Json& messages) {
  std::string text = "You may call these functions:\n";
  for (const Json& tool : tools) text += write_json(tool["function"]) + "\n";
  text +=
      "\nTo call a function, answer with nothing but a JSON object:\n"
      "{\"name\": NAME, \"arguments\": {...}}";
  std::string& system = messages.front()["content"].get_ref<std::string&>();
  system += (system.empty() ? "" : "\n\n") + text;
}

Json with_calls_as_text(const Json& messages) {
  Json out = messages;
  for (Json& message : out) {
    if (message["role"] == "tool")
      message = {{"role", "user"},
                 {"content", "The function returned:\n" + message["content"].get<std::string>()}};
    const auto calls = message.find("tool_calls");
    if (calls == message.end()) continue;
    std::string& content = message["content"].get_ref<std::string&>();
    for (const Json& call : *calls) content += (content.empty() ? "" : "\n") + write_json(call["function"]);
    message.erase("tool_calls");
  }
  return out;
}

OpenMark find_open_mark(std::string_view text) {
  OpenMark first;
  for (const CallFormat& format : kFormats)
    if (const size_t at = text.find(format.open); at < first.at) first = {at, format.open, &format};
  return first;
}

size_t begun_open_mark(std::string_view text) {
  size_t most = 0;
  for (const CallFormat& format : kFormats) most = std::max(most, begun(text, format.open));
  return most;
}

bool is_call_mark(std::string_view token) {
  return std::any_of(
             std::begin(kFormats), std::end(kFormats),
             [&](const CallFormat& f) { return token == f.open || (token == f.close && !token.empty()); }) ||
         std::find(std::begin(kInnerMarks), std::end(kInnerMarks), token) != std::end(kInnerMarks);
}

Found read_calls(const CallFormat& format, std::string_view text, bool last, const ToolTypes& types,
                 std::vector<ToolCall>& calls, size_t& length) {
  CallReader in{text, last};
  std::vector<ToolCall> read;
  if (!format.read(in, format, types, read)) return in.ended && !last ? Found::kMore : Found::kNone;
  length = text.size() - in.rest.size();
  calls = std::move(read);
  return Found::kCalls;
}

bool read_json_calls(std::string_view written, bool bare, std::vector<ToolCall>& calls) {
  const std::string text = compact_json(written);
  if (!text.starts_with('[')) return read_json_call(text, bare, calls);
  if (!parse_or_null(text).is_array()) return false;
  for (size_t at = 1; at + 1 < text.size();) {
    const size_t end = json_value_end(text, at);
    if (!read_json_call(text.substr(at, end - at), bare, calls)) return false;
    at = end + 1;
  }
  return text.size() > 2;
}

std::string arguments_json(std::string_view written) {
  if (written.empty() || written == "null") return "{}";
  const Json value = parse_or_null(std::string(written));
  if (value.is_object()) return std::string(written);
  if (!value.is_string()) return "";
  const std::string inner = compact_json(value.get_ref<const std::string&>());
  if (inner.empty()) return "{}";
  return parse_or_null(inner).is_object() ? inner : "";
}

std::string compact_json(std::string_view json) {
  std::string out;
  bool in_text = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_text && c == '\\' && i + 1 < json.size()) {
      out.append({c, json[++i]});
    } else if (in_text && static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else if (in_text || kJsonSpaces.find(c) == npos) {
      in_text ^= c == '"';
      out += c;
    }
  }
  return out;
}

size_t json_value_end(std::string_view json, size_t at) {
  size_t depth = 0;
  bool in_text = false;
  for (; at < json.size(); ++at) {
    const char c = json[at];
    if (in_text) {
      if (c == '\\')
        ++at;
      else
        in_text = c != '"';
    } else if (c == '"') {
      in_text = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (depth == 0 && (c == ',' || c == ':' || c == '}' || c == ']')) {
      break;
    } else if (c == '}' || c == ']') {
      if (--depth == 0) return at + 1;
    }
  }
  return std::min(at, json.size());
}

}  // namespace app::serve
