// Random numbers that are the same on every machine.
#pragma once

#include <cstdint>

namespace thimble {

// Advances `state` and returns the next number of its sequence (Steele, Lea and Flood 2014).
inline uint64_t splitmix64(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace thimble
