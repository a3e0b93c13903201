// What the recurrent mixers share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace thimble::cpu {

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// The state after a step without rows. `before`: null: zeros.
inline void copy_state(const float* before, float* after, size_t count) {
  if (before == after) return;
  for (size_t i = 0; i < count; ++i) after[i] = before ? before[i] : 0;
}

}  // namespace thimble::cpu
