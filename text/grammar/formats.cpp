#include "text/grammar/formats.h"

#include <utility>
#include <vector>

namespace thimble::grammar {
namespace {

// Years from 0001 on, because common libraries know no year 0.
const std::string kYear = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])";
const std::string kFours = "(?:0[48]|[2468][048]|[13579][26])";  // 04 to 96, which 4 divides
const std::string kLeapYear = "(?:[0-9]{2}" + kFours + "|" + kFours + "00)";
const std::string kDate =
    "(?:" + kYear +
    "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))|" +
    kLeapYear + "-02-29)";
// Without leap seconds, which common libraries refuse.
const std::string kTime =
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
const std::string kLabel = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?";
const std::string kHost = kLabel + "(?:\\." + kLabel + "){0,2}";
const std::string kByte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
const std::string kIpv4 = kByte + "(?:\\." + kByte + "){3}";

// Groups of hexadecimal digits, of which :: may replace some.
std::string ipv6() {
  const std::string group = "[0-9A-Fa-f]{1,4}";
  std::string pattern = "(?:" + group + ":){7}" + group;
  for (int before = 0; before <= 6; ++before) {
    const std::string first =
        before == 0 ? "" : group + "(?::" + group + "){" + std::to_string(before - 1) + "}";
    pattern += "|" + first + "::(?:" + group + "(?::" + group + "){0," + std::to_string(6 - before) + "})?";
  }
  return pattern;
}

const std::vector<std::pair<std::string_view, std::string>>& patterns() {
  static const std::string hex = "[0-9A-Fa-f]";
  static const std::vector<std::pair<std::string_view, std::string>> all = {
      {"date", kDate},
      {"time", kTime},
      {"date-time", kDate + "T" + kTime},
      {"duration",
       "P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
       "(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))?"
       "|T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))"},
      {"email", "[A-Za-z0-9_+-]{1,32}(?:\\.[A-Za-z0-9_+-]{1,31})?@" + kHost},
      {"hostname", kHost},
      {"ipv4", kIpv4},
      {"ipv6", ipv6()},
      {"uuid", hex + "{8}-" + hex + "{4}-" + hex + "{4}-" + hex + "{4}-" + hex + "{12}"}};
  return all;
}

}  // namespace

std::string format_pattern(std::string_view format) {
  for (const auto& [name, pattern] : patterns())
    if (name == format) return pattern;
  return {};
}

std::string format_names() {
  std::string names;
  for (const auto& [name, pattern] : patterns()) names += (names.empty() ? "" : ", ") + std::string(name);
  return names;
}

}  // namespace thimble::grammar
