#include "text/grammar/json_value.h"

#include <charconv>

#include "text/json.h"

namespace thimble::grammar {
namespace {

constexpr uint32_t kDeepest = 100;  // nesting of values

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Splits a JSON number. The digits are as written, and so is the power of ten. False: it is none.
bool split(std::string_view text, Decimal& out, std::string_view& power) {
  size_t at = 0;
  const auto digits = [&] {
    const size_t first = at;
    while (at < text.size() && is_digit(text[at])) ++at;
    return text.substr(first, at - first);
  };
  const auto take = [&](char c) { return at < text.size() && text[at] == c && ++at; };
  out.negative = take('-');
  out.whole = digits();
  if (out.whole.empty() || (out.whole[0] == '0' && out.whole.size() > 1)) return false;
  if (take('.') && (out.fraction = digits()).empty()) return false;
  if (take('e') || take('E')) {
    const size_t sign = at;
    if (!take('-')) take('+');
    if (digits().empty()) return false;
    power = text.substr(sign, at - sign);
  }
  return at == text.size();
}

Result<JsonValue> read_value(JsonReader& reader, uint32_t depth) {
  using Kind = JsonValue::Kind;
  if (depth > kDeepest)
    return error(Code::kUnsupported, "the JSON schema nests values more than %u deep", kDeepest);
  JsonValue value;
  switch (reader.peek()) {
    case '{':
      value.kind = Kind::kObject;
      THIMBLE_TRY(reader.object([&](const std::string& name) -> Status {
        THIMBLE_LET(member, read_value(reader, depth + 1));
        if (value.find(name))
          return error(Code::kInvalidArgument,
                       "the JSON schema has an object with two members of the same name");
        value.members.emplace_back(name, std::move(member));
        return {};
      }));
      return value;
    case '[':
      value.kind = Kind::kArray;
      THIMBLE_TRY(reader.array([&]() -> Status {
        THIMBLE_LET(item, read_value(reader, depth + 1));
        value.items.push_back(std::move(item));
        return {};
      }));
      return value;
    case '"': {
      value.kind = Kind::kString;
      THIMBLE_SET(value.text, reader.string());
      return value;
    }
    default:
      break;
  }
  THIMBLE_LET(word, reader.word());
  Decimal number;
  std::string_view power;
  if (word == "true" || word == "false") {
    value.kind = Kind::kBool;
    value.truth = word == "true";
  } else if (is_digit(word[0]) || word[0] == '-') {
    value.kind = Kind::kNumber;
    value.text = word;
    if (!split(word, number, power)) return reader.wrong();
  } else if (word != "null") {
    return reader.wrong();
  }
  return value;
}

}  // namespace

const JsonValue* JsonValue::find(std::string_view name) const {
  for (const auto& [key, value] : members)
    if (key == name) return &value;
  return nullptr;
}

Result<JsonValue> JsonValue::read(std::string_view text, const std::string& where) {
  JsonReader reader(text, where);
  THIMBLE_LET(value, read_value(reader, 0));
  THIMBLE_TRY(reader.end());
  return std::move(value);
}

bool Decimal::read(std::string_view text, Decimal& out) {
  constexpr size_t kMostDigits = 18;
  constexpr int kLargestPower = 64;
  out = {};
  std::string_view power;
  if (!split(text, out, power)) return false;
  const bool down = power.starts_with('-');
  if (down || power.starts_with('+')) power.remove_prefix(1);
  int shift = 0;
  if (!power.empty() &&
      (std::from_chars(power.data(), power.data() + power.size(), shift).ec != std::errc() ||
       shift > kLargestPower))
    return false;
  std::string& to = down ? out.fraction : out.whole;
  std::string& from = down ? out.whole : out.fraction;
  for (; shift > 0; --shift) {
    const bool none = from.empty();
    const char digit = none ? '0' : down ? from.back() : from.front();
    if (!none) from.erase(down ? from.size() - 1 : 0, 1);
    to.insert(down ? to.begin() : to.end(), digit);
  }
  out.whole.erase(0, out.whole.find_first_not_of('0'));
  out.fraction.erase(out.fraction.find_last_not_of('0') + 1);
  return out.whole.size() <= kMostDigits && out.fraction.size() <= kMostDigits;
}

}  // namespace thimble::grammar
