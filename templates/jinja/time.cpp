// Formats dates as strftime does, in English regardless of the machine's locale.
#include <chrono>
#include <cstdio>

#include "templates/jinja/builtins.h"

namespace thimble::jinja {
namespace {

constexpr const char* kMonths[] = {"January", "February", "March",     "April",   "May",      "June",
                                   "July",    "August",   "September", "October", "November", "December"};
constexpr const char* kDays[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                 "Thursday", "Friday", "Saturday"};

}  // namespace

Status format_time(int64_t seconds, std::string_view format, TextOut& out) {
  using namespace std::chrono;
  constexpr int64_t kDay = 86400, kMost = int64_t{1} << 37;  // covers a few thousand years in both directions
  if (seconds < -kMost || seconds > kMost) return error(Code::kInvalidArgument, "the time is out of range");
  const int64_t days_ = (seconds >= 0 ? seconds : seconds - kDay + 1) / kDay;
  const int second = static_cast<int>(seconds - days_ * kDay);
  const sys_days day{days{days_}};
  const year_month_day date{day};
  const std::string month = kMonths[static_cast<unsigned>(date.month()) - 1];
  const std::string day_name = kDays[std::chrono::weekday{day}.c_encoding()];
  const int hour = second / 3600, twelve = hour % 12 == 0 ? 12 : hour % 12;

  const auto weekday = static_cast<int>(std::chrono::weekday{day}.c_encoding());
  const auto of_year = static_cast<int>((day - sys_days{date.year() / January / 1}).count());
  // Conversions that abbreviate several others.
  const auto longer = [](char c) -> std::string_view {
    switch (c) {
      case 'c':
        return "%a %b %e %H:%M:%S %Y";
      case 'D':
      case 'x':
        return "%m/%d/%y";
      case 'F':
        return "%Y-%m-%d";
      case 'R':
        return "%H:%M";
      case 'r':
        return "%I:%M:%S %p";
      case 'T':
      case 'X':
        return "%H:%M:%S";
      default:
        return {};
    }
  };

  const auto number = [&](int value, int width) {
    char text[16];
    std::snprintf(text, sizeof text, "%0*d", width, value);
    out += text;
  };
  for (size_t i = 0; i < format.size() && out.status().ok(); ++i) {
    if (format[i] != '%' || i + 1 == format.size()) {
      out += format[i];
      continue;
    }
    const bool unpadded = format[i + 1] == '-' && i + 2 < format.size();
    i += unpadded ? 2 : 1;
    const int two = unpadded ? 1 : 2;
    if (const std::string_view several = longer(format[i]); !several.empty()) {
      THIMBLE_TRY(format_time(seconds, several, out));
      continue;
    }
    switch (format[i]) {
      case 'Y':
        number(static_cast<int>(date.year()), 4);
        break;
      case 'y':
        number(static_cast<int>(date.year()) % 100, two);
        break;
      case 'm':
        number(static_cast<int>(static_cast<unsigned>(date.month())), two);
        break;
      case 'd':
        number(static_cast<int>(static_cast<unsigned>(date.day())), two);
        break;
      case 'H':
        number(hour, two);
        break;
      case 'I':
        number(twelve, two);
        break;
      case 'M':
        number(second / 60 % 60, two);
        break;
      case 'S':
        number(second % 60, two);
        break;
      case 'B':
        out += month;
        break;
      case 'b':
      case 'h':
        out += month.substr(0, 3);
        break;
      case 'A':
        out += day_name;
        break;
      case 'a':
        out += day_name.substr(0, 3);
        break;
      case 'p':
        out += hour < 12 ? "AM" : "PM";
        break;
      case 'e':
        out += static_cast<unsigned>(date.day()) < 10 && !unpadded ? " " : "";
        number(static_cast<int>(static_cast<unsigned>(date.day())), 1);
        break;
      case 'f':  // the clock has whole seconds
        out += "000000";
        break;
      case 'j':
        number(of_year + 1, unpadded ? 1 : 3);
        break;
      case 'u':
        number(weekday == 0 ? 7 : weekday, 1);
        break;
      case 'w':
        number(weekday, 1);
        break;
      case 'U':
        number((of_year + 7 - weekday) / 7, two);
        break;
      case 'W':
        number((of_year + 7 - (weekday + 6) % 7) / 7, two);
        break;
      case 'Z':  // empty, because the time has no zone
      case 'z':
        break;
      case 'n':
        out += '\n';
        break;
      case 't':
        out += '\t';
        break;
      case '%':
        out += '%';
        break;
      default:
        return error(Code::kUnsupported, "strftime_now does not know %%%c", format[i]);
    }
  }
  return out.status();
}

}  // namespace thimble::jinja
