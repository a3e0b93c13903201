// JSON from untrusted clients (see json.h).
#include "apps/serve/json.h"

#include <algorithm>

namespace app::serve {

namespace {

constexpr int kDeepest = 64;
constexpr size_t kMostValues = 1 << 18, kMostNames = 1024;
constexpr size_t kMostStops = 16, kLongestStop = 1024;

[[noreturn]] void refuse_field(const char* name, const std::string& what) {
  throw Refusal(400, "\"" + std::string(name) + "\" must be " + what);
}

std::string range(const std::string& kind, const std::string& least, const std::string& most) {
  return kind + " from " + least + " to " + most;
}

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

const Json* typed_field(const Json& object, const char* name, Json::value_t type, const char* what) {
  const Json* field = find_field(object, name);
  if (field && field->type() != type) refuse_field(name, what);
  return field;
}

// Scans a text before values are made of it, and refuses invalid or excessive input. The library's parser has
// a callback that could do this, but its time then grows with the square of an array's length.
class Bounds : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool key(string_t&) override {
    if (++names_.back() > kMostNames)  // the parser searches each name among all earlier ones
      throw Refusal(400, "an object in the body has more than " + std::to_string(kMostNames) + " names");
    return true;
  }
  bool start_object(size_t) override {
    names_.push_back(0);
    return begin();
  }
  bool start_array(size_t) override { return begin(); }
  bool end_object() override {
    names_.pop_back();
    return end();
  }
  bool end_array() override { return end(); }
  bool parse_error(size_t position, const std::string&, const Json::exception& error) override {
    if (dynamic_cast<const Json::out_of_range*>(&error))
      throw Refusal(400, "the body has a number that is too large");
    throw Refusal(400, "the body is not JSON in UTF-8: the error is at byte " + std::to_string(position));
  }

 private:
  bool value() {
    if (++values_ > kMostValues)
      throw Refusal(400,
                    "the body has more than " + std::to_string(kMostValues) + " values; send texts as text");
    return true;
  }
  bool begin() {
    if (++depth_ > kDeepest)
      throw Refusal(400, "the body is nested deeper than " + std::to_string(kDeepest) + " levels");
    return value();
  }
  bool end() {
    --depth_;
    return true;
  }
  std::vector<size_t> names_;  // number of names of each open object
  size_t values_ = 0;
  int depth_ = 0;
};

// Makes the value while it checks the text.
class Builder : public Bounds {
 public:
  Json take() { return std::move(root_); }

  bool null() override { return Bounds::null() && add(nullptr); }
  bool boolean(bool value) override { return Bounds::boolean(value) && add(value); }
  bool number_integer(number_integer_t value) override { return Bounds::number_integer(value) && add(value); }
  bool number_unsigned(number_unsigned_t value) override {
    return Bounds::number_unsigned(value) && add(value);
  }
  bool number_float(number_float_t value, const string_t& text) override {
    const bool integer = text.find_first_of(".eE") == text.npos;
    return Bounds::number_float(value, text) &&
           add(integer ? Json::binary(std::vector<uint8_t>(text.begin(), text.end())) : Json(value));
  }
  bool string(string_t& value) override { return Bounds::string(value) && add(std::move(value)); }
  bool key(string_t& name) override {
    key_ = name;
    return Bounds::key(name);
  }
  bool start_object(size_t size) override { return Bounds::start_object(size) && open(Json::object()); }
  bool start_array(size_t size) override { return Bounds::start_array(size) && open(Json::array()); }
  bool end_object() override { return Bounds::end_object() && close(); }
  bool end_array() override { return Bounds::end_array() && close(); }

 private:
  bool add(Json value) {
    last_ = &root_;
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      last_ = &open_.back()->back();
    } else {
      last_ = &((*open_.back())[key_] = std::move(value));
    }
    return true;
  }
  bool open(Json empty) {
    add(std::move(empty));
    open_.push_back(last_);
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  Json root_;
  std::vector<Json*> open_;  // arrays and objects whose end has not come
  Json* last_ = nullptr;     // the value that was added last
  std::string key_;
};

bool holds_digits(const Json& json) {
  return json.is_binary() || (json.is_structured() && std::any_of(json.begin(), json.end(), holds_digits));
}

std::string dumped(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

void check_json(std::string_view text) {
  Bounds bounds;
  Json::sax_parse(text, &bounds);
}

Json parse_bounded(std::string_view text) {
  Builder builder;
  Json::sax_parse(text, &builder);
  return builder.take();
}

Json parse_or_null(std::string_view text) {
  try {
    return parse_bounded(text);
  } catch (const Refusal&) {
    return nullptr;
  }
}

std::string_view stripped(std::string_view text) {
  const size_t first = text.find_first_not_of(kJsonSpaces);
  return first == text.npos ? "" : text.substr(first, text.find_last_not_of(kJsonSpaces) + 1 - first);
}

Json parse_object(std::string_view text) {
  Json parsed = parse_bounded(text);
  if (!parsed.is_object()) throw Refusal(400, "the body must be a JSON object");
  return parsed;
}

std::string write_json(const Json& json) {
  if (!holds_digits(json)) return dumped(json);
  if (json.is_binary()) return {json.get_binary().begin(), json.get_binary().end()};
  std::string parts;
  for (const auto& [name, part] : json.items()) {
    if (!parts.empty()) parts += ',';
    if (json.is_object()) parts += dumped(name) + ":";
    parts += write_json(part);
  }
  return json.is_object() ? "{" + parts + "}" : "[" + parts + "]";
}

const Json* find_field(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::optional<double> number_field(const Json& object, const char* name, double least, double most) {
  const Json* field = find_field(object, name);
  if (!field) return std::nullopt;
  const std::string what = range("a number", short_number(least), short_number(most));
  if (!field->is_number()) refuse_field(name, what);
  const double value = field->get<double>();
  if (!(value >= least && value <= most)) refuse_field(name, what);
  return value;
}

std::optional<int64_t> integer_field(const Json& object, const char* name, int64_t least, int64_t most) {
  const Json* field = find_field(object, name);
  if (!field) return std::nullopt;
  const std::string what = range("an integer", std::to_string(least), std::to_string(most));
  const bool too_large =
      field->is_number_unsigned() && field->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  if (!field->is_number_integer() || too_large) refuse_field(name, what);
  const int64_t value = field->get<int64_t>();
  if (value < least || value > most) refuse_field(name, what);
  return value;
}

std::optional<bool> bool_field(const Json& object, const char* name) {
  const Json* field = typed_field(object, name, Json::value_t::boolean, "true or false");
  return field ? std::optional(field->get<bool>()) : std::nullopt;
}

const std::string* text_field(const Json& object, const char* name) {
  const Json* field = typed_field(object, name, Json::value_t::string, "a text");
  return field ? field->get_ptr<const std::string*>() : nullptr;
}

const Json* array_field(const Json& object, const char* name) {
  return typed_field(object, name, Json::value_t::array, "an array");
}

const Json* object_field(const Json& object, const char* name) {
  return typed_field(object, name, Json::value_t::object, "an object");
}

void refuse_unknown(const Json& object, std::initializer_list<FieldNames> known) {
  for (const auto& [key, value] : object.items()) {
    const auto is_key = [&key = key](const char* name) { return key == name; };
    if (!value.is_null() && std::none_of(known.begin(), known.end(), [&](FieldNames names) {
          return std::any_of(names.begin(), names.end(), is_key);
        }))
      throw Refusal(400, "\"" + key.substr(0, 100) + "\" is not supported; leave it out");
  }
}

void refuse_unless_neutral(const Json& object, const char* name, const Json& neutral) {
  const Json* field = find_field(object, name);
  if (!field || *field == neutral || (field->is_structured() && field->empty())) return;
  throw Refusal(400, "\"" + std::string(name) + "\" is not supported with this value; leave it out");
}

Form schema_form(const Json& given, const char* name) {
  const Json schema = given.is_string() ? parse_or_null(given.get_ref<const std::string&>()) : given;
  if (!schema.is_object() && !schema.is_boolean()) refuse_field(name, "a JSON schema");
  return {Form::Kind::kSchema, write_json(schema)};
}

const Json& messages_field(const Json& object) {
  const Json* messages = array_field(object, "messages");
  if (!messages || messages->empty())
    throw Refusal(400, "\"messages\" must be an array of at least one message");
  return *messages;
}

std::vector<std::string> stops_field(const Json& object, const char* name) {
  const Json* field = find_field(object, name);
  if (!field) return {};
  const std::string what = "a text or an array of at most " + std::to_string(kMostStops) + " texts of 1 to " +
                           std::to_string(kLongestStop) + " bytes";
  std::vector<std::string> stops;
  const auto add = [&](const Json& stop) {
    if (!stop.is_string() || stops.size() == kMostStops) refuse_field(name, what);
    stops.push_back(stop.get<std::string>());
    if (stops.back().empty() || stops.back().size() > kLongestStop) refuse_field(name, what);
  };
  if (!field->is_array()) {
    add(*field);
  } else {
    for (const Json& stop : *field) add(stop);
  }
  return stops;
}

std::string content_text(const Json& content) {
  if (content.is_string()) return content.get<std::string>();
  if (content.is_null()) return "";
  if (!content.is_array()) throw Refusal(400, "a message's \"content\" must be a text or an array of parts");
  std::string text;
  for (const Json& part : content) {
    const std::string* type = part.is_object() ? text_field(part, "type") : nullptr;
    const std::string* words = type && *type == "text" ? text_field(part, "text") : nullptr;
    if (!words)
      throw Refusal(
          400, "a part of \"content\" must be {\"type\": \"text\", \"text\": ...}; nothing else is read");
    text += *words;
  }
  return text;
}

}  // namespace app::serve
