// A checksum of bytes that may arrive in parts (XXH3, 64 bits). It detects damage, not tampering.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace thimble {

class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void add(const void* data, size_t bytes);
  // The checksum of all bytes added so far.
  uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The checksum of a whole buffer.
uint64_t checksum(const void* data, size_t bytes);

}  // namespace thimble
