// Errors are values with a reason: Status, Result<T> and the one macro that forwards them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace thimble {

// All status codes. Values are part of the C ABI and never change; new ones go in the gaps.
#define THIMBLE_STATUS_CODES(X)                                                          \
  X(Ok, OK, 0, "no error")                                                               \
  X(InvalidArgument, INVALID_ARGUMENT, 10, "an argument is not valid")                   \
  X(Unsupported, UNSUPPORTED, 11, "this build or device cannot do that")                 \
  X(Io, IO, 20, "a file could not be read")                                              \
  X(Format, FORMAT, 21, "a file is damaged or not of the expected format")               \
  X(Mismatch, MISMATCH, 22, "two files do not belong together")                          \
  X(Budget, BUDGET, 30, "the memory budget is too small")                                \
  X(OutOfMemory, OUT_OF_MEMORY, 31, "the system or the device is out of memory")         \
  X(ContextFull, CONTEXT_FULL, 40, "context_length_exceeded")                            \
  X(CannotRewind, CANNOT_REWIND, 41, "entries after that position were already evicted") \
  X(Interrupted, INTERRUPTED, 50, "interrupted; the next call continues from there")       \
  X(Busy, BUSY, 51, "another thread is using this session")                              \
  X(DeviceLost, DEVICE_LOST, 60, "the device was lost")                                  \
  X(NotFinite, NOT_FINITE, 61, "the model gave NaN or infinite logits")                  \
  X(Internal, INTERNAL, 90, "a defect in the library")

enum class Code : int32_t {
#define X(name, c_name, value, text) k##name = value,
  THIMBLE_STATUS_CODES(X)
#undef X
};

// The name of a code as in the C API, without its prefix: "OK", "BUDGET", ...
const char* code_name(Code code);
// One sentence that explains a code in general.
const char* code_text(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  // One sentence for the user that says what is wrong and what to do; empty if ok.
  const std::string& message() const { return message_; }
  // kBudget: bytes that the budget lacks.
  uint64_t bytes_missing() const { return bytes_missing_; }
  Status& set_bytes_missing(uint64_t bytes) {
    bytes_missing_ = bytes;
    return *this;
  }

 private:
  Code code_ = Code::kOk;
  uint64_t bytes_missing_ = 0;
  std::string message_;
};

// Creates a Status with a printf format: error(Code::kFormat, "%s: version %u", path, version).
#if defined(__MINGW32__) && !defined(__clang__)
__attribute__((format(gnu_printf, 2, 3)))
#else
__attribute__((format(printf, 2, 3)))
#endif
Status
error(Code code, const char* format, ...);

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

inline Status to_status(Status s) { return s; }
template <typename T>
Status to_status(const Result<T>& r) {
  return r.status();
}

}  // namespace thimble

// Returns from the calling function with the error of a Status or Result, if it holds one.
#define THIMBLE_TRY(expression)                                                        \
  do {                                                                                 \
    if (auto&& thimble_try_ = (expression); !thimble_try_.ok())                        \
      return ::thimble::to_status(std::forward<decltype(thimble_try_)>(thimble_try_)); \
  } while (0)

// Declares `name` with the value of a Result, or returns from the calling function with its error.
#define THIMBLE_LET(name, expression)                     \
  auto name##_result = (expression);                      \
  if (!name##_result.ok()) return name##_result.status(); \
  auto& name = *name##_result

// Assigns the value of a Result to `target`, or returns from the calling function with its error.
#define THIMBLE_SET(target, expression)                         \
  do {                                                          \
    auto thimble_result_ = (expression);                        \
    if (!thimble_result_.ok()) return thimble_result_.status(); \
    target = std::move(*thimble_result_);                       \
  } while (0)
