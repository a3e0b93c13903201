// A JSON value in memory, for schemas.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace thimble::grammar {

struct JsonValue {
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject } kind = Kind::kNull;
  bool truth = false;                                      // kBool
  std::string text;                                        // kString; kNumber: as it is written
  std::vector<JsonValue> items;                            // kArray
  std::vector<std::pair<std::string, JsonValue>> members;  // kObject, in the order of the text

  bool operator==(const JsonValue&) const = default;
  bool is(Kind k) const { return kind == k; }
  // The member with this name, or null.
  const JsonValue* find(std::string_view name) const;

  // Error messages call the text `where`.
  static Result<JsonValue> read(std::string_view text, const std::string& where);
};

// A JSON number as decimal digits: "-1.50e1" is negative, "15", "".
struct Decimal {
  bool negative = false;
  std::string whole, fraction;  // without leading and without trailing zeros

  bool zero() const { return whole.empty() && fraction.empty(); }
  // False if it is not a JSON number, or needs more than 18 digits before or after the point.
  static bool read(std::string_view text, Decimal& out);
};

}  // namespace thimble::grammar
