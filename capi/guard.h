// Helpers for all entry points: a guard that stops exceptions, errors in the caller's memory, structs of any
// version, and two-call functions.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <string_view>
#include <system_error>

#include "base/status.h"
#include "text/utf8.h"
#include "thimble/thimble.h"

namespace thimble::capi {

// The longest prefix of `text` with at most `limit` bytes that does not cut a code point.
inline std::string_view cut_text(std::string_view text, size_t limit) {
  if (text.size() <= limit) return text;
  while (limit > 0 && (static_cast<uint8_t>(text[limit]) & 0xc0) == 0x80) --limit;
  return text.substr(0, limit);
}

// Writes `text` as a C string that is safe to print, because much of it comes from files. The text is cut at
// a whole code point. Invalid UTF-8 becomes '?', and control characters become escapes such as "\u001b".
inline void copy_text(char* out, size_t capacity, std::string_view text) {
  size_t at = 0;
  while (!text.empty()) {
    const CodePoint point = first_code_point(text);
    char escape[8];
    std::string_view shown = text.substr(0, point.size);
    if (point.value >= kInvalidUtf8) {
      shown = "?";
    } else if (is_control(point.value)) {
      shown = {escape, static_cast<size_t>(std::snprintf(escape, sizeof escape, "\\u%04x", point.value))};
    }
    if (at + shown.size() >= capacity) break;
    std::copy(shown.begin(), shown.end(), out + at);
    at += shown.size();
    text.remove_prefix(point.size);
  }
  out[at] = '\0';
}

// Fills in the caller's error struct, if any, and returns the status code.
inline thimble_status fail(thimble_error* out, Code code, uint64_t bytes_missing, std::string_view message) {
  constexpr size_t kMessage = offsetof(thimble_error, message);
  if (out && out->struct_size > kMessage) {
    out->code = static_cast<thimble_status>(code);
    out->bytes_missing = bytes_missing;
    copy_text(out->message, std::min<size_t>(out->struct_size - kMessage, sizeof out->message), message);
  }
  return static_cast<thimble_status>(code);
}

// Runs the body of an entry point, `() -> Status`. No exception leaves it. The out-of-memory path does not
// allocate.
template <typename Body>
thimble_status guard(thimble_error* out, Body body) noexcept {
  constexpr std::string_view kNoMemory = "the system has no more memory; free some or lower the budget";
  try {
    const Status status = body();
    if (status.ok()) return THIMBLE_OK;
    return fail(out, status.code(), status.bytes_missing(), status.message());
  } catch (const std::bad_alloc&) {
    return fail(out, Code::kOutOfMemory, 0, kNoMemory);
  } catch (const std::system_error&) {  // a thread could not be started
    return fail(out, Code::kOutOfMemory, 0, "the system has no more threads; free some or ask for fewer");
  } catch (...) {
    return fail(out, Code::kInternal, 0, "an exception reached the C boundary, a defect; please report it");
  }
}

inline Status null_argument(const char* name) {
  return error(Code::kInvalidArgument, "%s is NULL; pass a valid pointer", name);
}

// Checks a pointer and names it in the error: THIMBLE_TRY(need(model, "model")).
inline Status need(const void* pointer, const char* name) { return pointer ? Status() : null_argument(name); }

// Checks an array that the caller owns. NULL is valid if the array is empty.
template <typename T>
Status need_array(const T* array, uint64_t count, const char* name) {
  if (!array && count) return null_argument(name);
  if (count > PTRDIFF_MAX / sizeof(T))
    return error(Code::kInvalidArgument, "%s has %" PRIu64 " elements, more than memory can hold", name,
                 count);
  return {};
}

// ---- structs that start with their size ----

// The size of a struct in its first version. A smaller size is an error. When a struct grows, pin its first
// size here.
template <typename T>
inline constexpr uint32_t kFirstSize = sizeof(T);
template <>
inline constexpr uint32_t kFirstSize<thimble_session_options> = offsetof(thimble_session_options,
                                                                         select_page);
template <>
inline constexpr uint32_t kFirstSize<thimble_model_info> = offsetof(thimble_model_info, chat_problem);
template <>
inline constexpr uint32_t kFirstSize<thimble_stats> = offsetof(thimble_stats, saturated);
template <>
inline constexpr uint32_t kFirstSize<thimble_memory> = offsetof(thimble_memory, draft);
template <>
inline constexpr uint32_t kFirstSize<thimble_sampler_options> = offsetof(thimble_sampler_options,
                                                                         presence_penalty);
template <>
inline constexpr uint32_t kFirstSize<thimble_training_options> = offsetof(thimble_training_options,
                                                                          text_tokens);

template <typename T>
Status need_struct(const T* lent, const char* name) {
  THIMBLE_TRY(need(lent, name));
  if (lent->struct_size < kFirstSize<T>)
    return error(Code::kInvalidArgument,
                 "%s.struct_size is %u; set it to the struct's size, which is at least %u", name,
                 lent->struct_size, kFirstSize<T>);
  return {};
}

// Overwrites the defaults in `to` with the fields that the caller's version of an option struct has. NULL
// keeps all defaults.
template <typename T>
Status read_struct(const T* lent, const char* name, T& to) {
  if (!lent) return {};
  THIMBLE_TRY(need_struct(lent, name));
  std::memcpy(&to, lent, std::min<size_t>(lent->struct_size, sizeof to));
  return {};
}

// Writes the fields that the caller's version of the struct has. need_struct has checked the struct before.
template <typename T>
void write_struct(T* lent, T value) {
  value.struct_size = lent->struct_size;
  std::memcpy(lent, &value, std::min<size_t>(lent->struct_size, sizeof value));
}

// For the *_init functions: writes the defaults, and 0 in fields that this version does not know.
template <typename T>
void init_struct(T* lent, uint32_t struct_size, T defaults) {
  if (!lent || struct_size < sizeof lent->struct_size) return;
  defaults.struct_size = struct_size;
  std::memset(lent, 0, struct_size);
  std::memcpy(lent, &defaults, std::min<size_t>(struct_size, sizeof defaults));
}

// ---- two-call functions ----

// Checks the buffer and the count of a two-call function.
template <typename T>
Status need_buffer(const T* buffer, uint64_t capacity, const uint64_t* count, const char* name) {
  if (!count) return null_argument("the output count");
  return need_array(buffer, capacity, name);
}

// Sets the count. Returns an error if the buffer is too small for it.
inline Status need_room(uint64_t needed, uint64_t capacity, uint64_t* count) {
  *count = needed;
  if (needed <= capacity) return {};
  return error(Code::kInvalidArgument,
               "the buffer has room for %" PRIu64 " elements and %" PRIu64 " are needed", capacity, needed);
}

inline Status give_text(std::string_view text, char* buffer, uint64_t capacity, uint64_t* length) {
  THIMBLE_TRY(need_room(text.size(), capacity, length));
  std::copy(text.begin(), text.end(), buffer);
  return {};
}

}  // namespace thimble::capi
