// The ascending positions of a run's entries. Device side.
#pragma once

#include <cstdint>

namespace thimble::cuda {

// The index of the first of n ascending positions that is not less than `position`.
__device__ inline uint32_t lower_bound(const int32_t* pos, uint32_t n, int32_t position) {
  uint32_t low = 0;
  while (low < n) {
    const uint32_t middle = (low + n) / 2;
    if (pos[middle] < position)
      low = middle + 1;
    else
      n = middle;
  }
  return low;
}

}  // namespace thimble::cuda
