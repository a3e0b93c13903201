// FNV-1a, a hash of 64 bits for keys and for recognising what was seen before. Its values are stored in
// files, so they never change. It does not detect damage well: checksum.h does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace thimble {

inline constexpr uint64_t kFnv1aBasis = 0xcbf29ce484222325u;
inline constexpr uint64_t kFnv1aPrime = 0x100000001b3u;

// The hash of `bytes` bytes at `data`, after those that gave `hash`.
inline uint64_t fnv1a(const void* data, size_t bytes, uint64_t hash = kFnv1aBasis) {
  const auto* at = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * kFnv1aPrime;
  return hash;
}
inline uint64_t fnv1a(std::string_view text, uint64_t hash = kFnv1aBasis) {
  return fnv1a(text.data(), text.size(), hash);
}

}  // namespace thimble
