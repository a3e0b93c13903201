#include "text/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "templates/jinja/builtins.h"
#include "templates/jinja/json.h"
#include "templates/jinja/text.h"
#include "text/utf8.h"

namespace thimble::jinja {
namespace {

Result<Value> read(Heap& heap, JsonReader& in, uint32_t depth);

Result<Value> read_word(Heap& heap, JsonReader& in) {
  THIMBLE_LET(word, in.word());
  if (word == "true" || word == "false") return Value(word == "true");
  if (word == "null") return Value(None());
  const char* end = word.data() + word.size();
  int64_t integer = 0;
  if (const auto read = std::from_chars(word.data(), end, integer); read.ptr == end && read.ec == std::errc())
    return Value(integer);
  double real = 0;
  const bool numeric = word[0] == '-' || (word[0] >= '0' && word[0] <= '9');
  const bool whole = word.find_first_not_of("0123456789", 1) == std::string_view::npos;
  if (numeric && whole && word != "-") return heap.digits(word);
  if (const auto read = std::from_chars(word.data(), end, real); numeric && read.ptr == end) {
    if (read.ec == std::errc()) return Value(real);
    return Value(float_beyond(word));
  }
  return in.wrong();
}

Result<Value> read_object(Heap& heap, JsonReader& in, uint32_t depth) {
  THIMBLE_LET(dict, heap.dict());
  THIMBLE_TRY(in.object([&](const std::string& name) -> Status {
    THIMBLE_LET(key, heap.text(name));
    THIMBLE_LET(value, read(heap, in, depth + 1));
    return heap.set(*dict, *as<Text>(key), value);
  }));
  return Value(dict);
}

Result<Value> read(Heap& heap, JsonReader& in, uint32_t depth) {
  THIMBLE_TRY(heap.check_stack());
  if (depth > kDeepestValue) return error(Code::kUnsupported, "JSON is nested deeper than %u", kDeepestValue);
  switch (in.peek()) {
    case '{':
      return read_object(heap, in, depth);
    case '[': {
      THIMBLE_LET(list, heap.list());
      THIMBLE_TRY(in.array([&]() -> Status {
        THIMBLE_LET(value, read(heap, in, depth + 1));
        return heap.append(*list, value);
      }));
      return Value(list);
    }
    case '"': {
      THIMBLE_LET(text, in.string());
      return heap.text(std::move(text));
    }
    default:
      return read_word(heap, in);
  }
}

// Writes JSON as Python's json.dumps does.
class Writer {
 public:
  Writer(Heap& heap, bool ascii, bool sorted) : out(heap), heap_(heap), ascii_(ascii), sorted_(sorted) {}
  Status write(const Value& value, size_t depth);

  bool indents = false;
  std::string margin, between = ", ", colon = ": ";
  TextOut out;

 private:
  Status write_list(const List& list, size_t depth);
  Status write_dict(const Dict& dict, size_t depth);
  Status write_scalar(const Value& value);
  void write_text(std::string_view text);
  void new_line(size_t depth) {
    if (!indents) return;
    out += '\n';
    out.add(depth, margin);
  }

  Heap& heap_;
  const bool ascii_, sorted_;
};

void Writer::write_text(std::string_view text) {
  out += '"';
  while (!text.empty()) {
    const CodePoint point = first_code_point(text);
    const std::string_view bytes = text.substr(0, point.size);
    text.remove_prefix(point.size);
    constexpr std::string_view kSpecial = "\"\\\b\f\n\r\t", kWritten = "\"\\bfnrt";
    const size_t special = point.value < 0x80 ? kSpecial.find(bytes) : std::string_view::npos;
    const auto unit = [&](uint32_t code) {
      char text_[8];
      std::snprintf(text_, sizeof text_, "\\u%04x", code);
      out += text_;
    };
    if (special != std::string_view::npos) {
      (out += '\\') += kWritten[special];
    } else if (point.value == kGuardCode) {
      out += bytes;  // guards the text after it and is not part of the text
    } else if (point.value < 0x20 || (ascii_ && point.value >= 0x7f && point.value < 0x10000)) {
      unit(point.value);
    } else if (ascii_ && point.value >= 0x10000) {
      if (point.value >= kInvalidUtf8) {
        unit(0xfffd);
        continue;
      }
      unit(0xd800 + ((point.value - 0x10000) >> 10));
      unit(0xdc00 + ((point.value - 0x10000) & 0x3ff));
    } else {
      out += bytes;
    }
  }
  out += '"';
}

Status Writer::write_scalar(const Value& value) {
  if (const std::string* text = as_text(value)) {
    write_text(*text);
  } else if (is<None>(value)) {
    out += "null";
  } else if (const bool* flag = as<bool>(value)) {
    out += *flag ? "true" : "false";
  } else if (const int64_t* integer = as<int64_t>(value)) {
    out += std::to_string(*integer);
  } else if (const Digits* digits = as<Digits>(value)) {
    out += *digits->text;
  } else if (const double* real = as<double>(value)) {
    out += std::isfinite(*real) ? float_text(*real)
           : std::isnan(*real)  ? "NaN"
           : *real < 0          ? "-Infinity"
                                : "Infinity";
  } else {
    return error(Code::kInvalidArgument, "%s cannot be written as JSON", kind_name(value));
  }
  return {};
}

Status Writer::write_list(const List& list, size_t depth) {
  out += '[';
  for (size_t i = 0; i < list.items.size(); ++i) {
    if (i) out += between;
    new_line(depth + 1);
    THIMBLE_TRY(write(list.items[i], depth + 1));
  }
  if (!list.items.empty()) new_line(depth);
  out += ']';
  return {};
}

Status Writer::write_dict(const Dict& dict, size_t depth) {
  THIMBLE_TRY(heap_.spend_bytes(dict.items.size() * sizeof dict.items[0]));
  std::vector<std::pair<Text, Value>> items = dict.items;
  if (sorted_)
    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return *a.first < *b.first; });
  out += '{';
  for (size_t i = 0; i < items.size(); ++i) {
    if (i) out += between;
    new_line(depth + 1);
    const Value key = key_value(items[i].first);
    write_text(is<Text>(key) ? *as_text(key) : std::to_string(*as<int64_t>(key)));
    out += colon;
    THIMBLE_TRY(write(items[i].second, depth + 1));
  }
  if (!items.empty()) new_line(depth);
  out += '}';
  return {};
}

Status Writer::write(const Value& value, size_t depth) {
  if (depth > kDeepestValue)
    return error(Code::kUnsupported, "values are nested deeper than %u, or within themselves", kDeepestValue);
  THIMBLE_TRY(heap_.check_stack());
  THIMBLE_TRY(heap_.spend_steps(1));
  THIMBLE_TRY(out.status());
  if (is<List*>(value) && (*as<List*>(value))->is_plain()) return write_list(**as<List*>(value), depth);
  if (is<Dict*>(value)) return write_dict(**as<Dict*>(value), depth);
  return write_scalar(value);
}

Status read_layout(const Call& c, Writer& writer) {
  writer.indents = c.given(1) && !is<None>(c.arguments[1]);
  if (writer.indents) {
    writer.between = ",";
    if (const std::string* text = as_text(c.arguments[1])) {
      writer.margin = *text;
    } else {
      THIMBLE_LET(width, c.integer(1, 0));
      writer.margin.assign(static_cast<size_t>(std::clamp<int64_t>(width, 0, 64)), ' ');
    }
  }
  if (!c.given(2) || is<None>(c.arguments[2])) return {};
  List* const* both = as<List*>(c.arguments[2]);
  if (!both || (*both)->items.size() != 2 || !is<Text>((*both)->items[0]) || !is<Text>((*both)->items[1]))
    return error(Code::kInvalidArgument, "separators are two texts: (',', ':')");
  writer.between = *as_text((*both)->items[0]);
  writer.colon = *as_text((*both)->items[1]);
  return {};
}

}  // namespace

Result<Value> read_json(Heap& heap, std::string_view text, const std::string& where) {
  const Recursion recursion(heap);
  JsonReader in(text, where);
  THIMBLE_LET(value, read(heap, in, 0));
  THIMBLE_TRY(in.end());
  return std::move(value);
}

Result<std::string> write_json(Heap& heap, const Value& value) {
  Writer writer(heap, false, false);
  THIMBLE_TRY(writer.write(value, 0));
  return writer.out.take();
}

Result<Value> to_json(Call& c) {
  Writer writer(c.heap, c.flag(0), c.flag(3));
  THIMBLE_TRY(read_layout(c, writer));
  THIMBLE_TRY(writer.write(c.self, 0));
  return writer.out.value();
}

Result<Value> from_json(Call& c) {
  const std::string* text = as_text(c.self);
  if (!text)
    return error(Code::kInvalidArgument, "from_json reads a text, and %s was given", kind_name(c.self));
  return read_json(c.heap, *text, "a text that from_json reads");
}

}  // namespace thimble::jinja
