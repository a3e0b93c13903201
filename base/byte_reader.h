// Reads values from untrusted bytes. A read past the end returns false and does not advance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace thimble {

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes)
      : begin_(bytes.data()), at_(begin_), left_(bytes.size()) {}

  const std::byte* at() const { return at_; }
  uint64_t left() const { return left_; }
  uint64_t position() const { return static_cast<uint64_t>(at_ - begin_); }

  bool skip(uint64_t bytes) {
    if (bytes > left_) return false;
    at_ += bytes;
    left_ -= bytes;
    return true;
  }

  // Reads a little-endian value; all files that we read are little-endian.
  template <typename T>
  bool read(T& value) {
    const std::byte* from = at_;
    if (!skip(sizeof value)) return false;
    std::memcpy(&value, from, sizeof value);
    return true;
  }

  // Sets `text` to the next `size` bytes, without a copy.
  bool take(uint64_t size, std::string_view& text) {
    const std::byte* from = at_;
    if (!skip(size)) return false;
    text = {reinterpret_cast<const char*>(from), static_cast<size_t>(size)};
    return true;
  }

 private:
  const std::byte* begin_;
  const std::byte* at_;
  uint64_t left_;
};

}  // namespace thimble
