// FNV-1a, a hash of 64 bits. Its values are stored in files, so they never change.
#pragma once

#include <cstdint>

namespace app {

inline constexpr uint64_t kFnv1aBasis = 0xcbf29ce484222325u;

// The hash of a value that comes after those that gave `hash`: of a byte, or of a whole token id.
constexpr uint64_t fnv1a(uint64_t hash, uint32_t value) { return (hash ^ value) * 0x100000001b3u; }

}  // namespace app
