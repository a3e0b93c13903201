#include "base/status.h"

#include <cstdarg>
#include <cstdio>

namespace thimble {

const char* code_name(Code code) {
  switch (code) {
#define X(name, c_name, value, text) \
  case Code::k##name:                \
    return #c_name;
    THIMBLE_STATUS_CODES(X)
#undef X
  }
  return "UNKNOWN";
}

const char* code_text(Code code) {
  switch (code) {
#define X(name, c_name, value, text) \
  case Code::k##name:                \
    return text;
    THIMBLE_STATUS_CODES(X)
#undef X
  }
  return "unknown status code";
}

Status error(Code code, const char* format, ...) {
  char message[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return Status(code, message);
}

}  // namespace thimble
