// Files in which a training saves its work until the result is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/fnv1a.h"
#include "base/state_file.h"

namespace thimble {

constexpr uint64_t kHashSeed = kFnv1aBasis;
// Like fnv1a(), but over 64-bit words, which is faster and gives other values.
uint64_t hash_of(const void* data, size_t bytes, uint64_t hash = kHashSeed);

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Opens a file, or creates an empty one. The file begins with a signature of the training; a different
// signature gives Mismatch. The saved data starts at kPartialBegin.
constexpr uint64_t kPartialBegin = 2 * sizeof(uint64_t);
Result<StateFile> open_partial(const std::string& path, uint64_t signature);

// A state that is saved alternately in two places of a file. load() reads the later complete one, because the
// process may end while it writes the other.
class SavedTwice {
 public:
  // The two places follow each other in the file, starting at `at`. `bytes` is the size of one state, summed
  // over its parts.
  SavedTwice(uint64_t at, uint64_t bytes) : at_(at), bytes_(bytes) {}
  Status save(StateFile&, const std::vector<std::span<std::byte>>& state);
  // Returns false if no complete state was saved. The contents of `state` are undefined then.
  Result<bool> load(StateFile&, const std::vector<std::span<std::byte>>& state);

 private:
  // Verifies the state that is stored after it.
  struct Header {
    uint64_t hash, saves;
  };
  uint64_t place(uint64_t slot) const { return at_ + slot * (sizeof(Header) + bytes_); }

  uint64_t at_, bytes_, saves_ = 0;
};

}  // namespace thimble
