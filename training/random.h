// Random numbers that depend only on the seed, not on the machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/splitmix64.h"

namespace thimble {

struct Random {
  uint64_t state;

  uint64_t next() { return splitmix64(state); }
  // In [0, n).
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
  // In [low, high].
  uint32_t between(uint32_t low, uint32_t high) { return low + below(high - low + 1); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool chance(double p) { return uniform() < p; }
  // The sum of four uniform numbers. It is close to normal, and has the same bits on every machine.
  float normal() {
    const double sum = uniform() + uniform() + uniform() + uniform() - 2;
    return static_cast<float>(sum * std::sqrt(3.0));
  }
  template <typename T, size_t n>
  const T& of(const T (&items)[n]) {
    return items[below(n)];
  }
  template <typename T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(static_cast<uint32_t>(i))]);
  }
};

// The generator with this number among those of one seed.
inline Random random_of(uint64_t seed, uint64_t number) {
  Random r{seed * 0x9e3779b97f4a7c15u + number};
  r.next();
  return r;
}

}  // namespace thimble
