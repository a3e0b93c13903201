// Random numbers that are the same on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/splitmix64.h"

namespace thimble::test {

struct Random {
  uint64_t state = 1;
  uint64_t next() { return splitmix64(state); }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
  float uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(next() >> 40) * 0x1p-24f;
  }
  std::vector<float> floats(size_t n, float low = -1, float high = 1) {
    std::vector<float> v(n);
    for (float& f : v) f = uniform(low, high);
    return v;
  }
};

}  // namespace thimble::test
