// A checksum of bytes that may come in parts (XXH3, 64 bits): tells damage, not malice.
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
  // Of all that was added so far.
  uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Of bytes that are all there.
uint64_t checksum(const void* data, size_t bytes);

}  // namespace thimble
