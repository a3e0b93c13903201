// Files in which a training keeps its work until the result is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/state_file.h"

namespace thimble {

constexpr uint64_t kHashSeed = 0xcbf29ce484222325u;
// FNV-1a, by words.
uint64_t hash_of(const void* data, size_t bytes, uint64_t hash = kHashSeed);

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Opens a file, or makes an empty one that begins with a signature of what is trained; Mismatch where it has
// another. What is kept lies from kPartialBegin on.
constexpr uint64_t kPartialBegin = 2 * sizeof(uint64_t);
Result<StateFile> open_partial(const std::string& path, uint64_t signature);

// A state that was saved, by whichever of two places is whole and later: the process may end while the other
// is written.
class SavedTwice {
 public:
  // The places lie behind each other from `at` on, each for so many bytes: those of all parts of a state.
  SavedTwice(uint64_t at, uint64_t bytes) : at_(at), bytes_(bytes) {}
  Status save(StateFile&, const std::vector<std::span<std::byte>>& state);
  // False where none was saved whole: the state is then anything.
  Result<bool> load(StateFile&, const std::vector<std::span<std::byte>>& state);

 private:
  // Vouches for the state behind it.
  struct Header {
    uint64_t hash, saves;
  };
  uint64_t place(uint64_t slot) const { return at_ + slot * (sizeof(Header) + bytes_); }

  uint64_t at_, bytes_, saves_ = 0;
};

}  // namespace thimble
