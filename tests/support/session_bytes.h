// Saved sessions in memory, unchanged or modified.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "runtime/session.h"

namespace thimble::test {

using SessionBytes = std::vector<std::byte>;

inline MappedFile lend(const SessionBytes& bytes) { return MappedFile::lend(bytes.data(), bytes.size()); }

// Size of the fixed part of a file's head (runtime/session_file.h).
inline constexpr size_t kFixedHead = 248;

// The end of the head, without its checksum, according to its own sizes; 0 if that is outside of the file.
inline size_t head_end(const SessionBytes& bytes) {
  if (bytes.size() < kFixedHead) return 0;
  const auto number = [&](size_t at, size_t size) {
    uint64_t value = 0;
    std::memcpy(&value, &bytes[at], size);
    return value;
  };
  constexpr size_t kRun = 12, kToken = 4, kAccepted = 16;
  size_t end = kFixedHead;
  const auto add = [&](uint64_t count, size_t size) {
    end = count < bytes.size() ? end + count * size : bytes.size();
  };
  add(number(16, 8), 1);
  add(number(12, 4), kRun);
  add(number(24, 8), kToken);
  add(number(32, 8), kToken);
  add(number(40, 8), kAccepted);
  add(number(48, 8), 1);
  return end + 16 <= bytes.size() ? end : 0;
}

// Sets correct checksums, so that errors in the bytes must be found by validation.
inline SessionBytes sign(SessionBytes bytes) {
  const size_t end = head_end(bytes);
  if (!end) return bytes;
  const auto put = [&](size_t at) {
    const uint64_t sum = checksum(bytes.data(), at);
    std::memcpy(&bytes[at], &sum, sizeof sum);
  };
  put(end);
  put(bytes.size() - sizeof(uint64_t));
  return bytes;
}

}  // namespace thimble::test
