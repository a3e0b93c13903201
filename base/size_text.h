// Formats byte sizes for people.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace thimble {

// "5.3 GiB", "512 B".
inline std::string size_text(uint64_t bytes) {
  const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 5; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.1f %s" : "%.0f %s", value, kUnits[unit]);
  return text;
}

}  // namespace thimble
