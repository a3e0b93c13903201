// Transposes matrices of 16-bit numbers.
#pragma once

#include <algorithm>
#include <cstdint>

namespace thimble {

// y[c][r] = x[r][c], in squares that fit into the cache. y_stride: elements between rows of y.
inline void transpose(const uint16_t* x, uint32_t rows, uint32_t cols, uint16_t* y, uint64_t y_stride) {
  constexpr uint32_t kSquare = 32;
  for (uint32_t r0 = 0; r0 < rows; r0 += kSquare)
    for (uint32_t c0 = 0; c0 < cols; c0 += kSquare)
      for (uint32_t c = c0; c < std::min(cols, c0 + kSquare); ++c)
        for (uint32_t r = r0; r < std::min(rows, r0 + kSquare); ++r)
          y[c * y_stride + r] = x[uint64_t(r) * cols + c];
}

}  // namespace thimble
