// Parses and formats byte sizes as people write them ("64MiB", "1.5GB"); formats counts and durations.
#pragma once

#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

namespace app {

// Parses "4096", "64KiB", "1.5 GiB" or "8GB" to bytes. Decimal units are powers of 1000, and binary units are
// powers of 1024. Case is ignored. Returns nothing for any other text, for zero, and for sizes that exceed 64
// bits. "64M" is refused because it may mean either unit.
inline std::optional<uint64_t> parse_size(const std::string& text) {
  size_t digits = 0, points = 0, at = 0;
  for (; at < text.size() && (std::isdigit(static_cast<unsigned char>(text[at])) || text[at] == '.'); ++at) {
    (text[at] == '.' ? points : digits) += 1;
  }
  if (digits == 0 || points > 1) return std::nullopt;
  std::string unit = text.substr(at);
  if (unit.size() > 1 && unit[0] == ' ') unit.erase(0, 1);
  for (char& c : unit) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  double scale = 0;
  if (unit.empty() || unit == "b") {
    if (points) return std::nullopt;
    scale = 1;
  }
  const char* kPrefixes = "kmgt";
  for (int i = 0; i < 4; ++i) {
    if (unit == std::string{kPrefixes[i], 'b'}) scale = std::pow(1000.0, i + 1);
    if (unit == std::string{kPrefixes[i], 'i', 'b'}) scale = std::pow(1024.0, i + 1);
  }
  const double bytes = std::strtod(text.substr(0, at).c_str(), nullptr) * scale;
  if (!(bytes >= 1) || bytes >= 9.2e18) return std::nullopt;
  return static_cast<uint64_t>(bytes);
}

// "64.0 MiB", "512 B".
inline std::string format_size(uint64_t bytes) {
  const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 5; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.1f %s" : "%.0f %s", value, kUnits[unit]);
  return text;
}

// "57,004".
inline std::string format_count(uint64_t count) {
  std::string text = std::to_string(count);
  for (int64_t i = static_cast<int64_t>(text.size()) - 3; i > 0; i -= 3)
    text.insert(static_cast<size_t>(i), ",");
  return text;
}

// "5:03", minutes and seconds.
inline std::string format_duration(double seconds) {
  const auto whole = static_cast<unsigned long long>(seconds);
  char text[32];
  std::snprintf(text, sizeof text, "%llu:%02llu", whole / 60, whole % 60);
  return text;
}

}  // namespace app
