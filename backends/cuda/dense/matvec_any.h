// Products of a matrix of any type and single vectors; matvec.h uses them for types without a format, and for
// matrices with a scale.
#pragma once

#include "backends/cuda/ops.h"

namespace thimble::cuda {

// y = scale * W x + bias, or y += that, or y = act(y) * that.
struct AnyProduct {
  const std::byte* w = nullptr;  // multiply_any() fills in these three
  uint64_t row_bytes = 0;
  float scale = 1;
  uint32_t rows = 0, cols = 0;  // of W
  const float* x = nullptr;     // [x_rows][x_stride]
  uint32_t x_stride = 0;
  uint32_t x_rows = kStepRows;  // kStepRows, kLogitRows
  float* y = nullptr;           // [x_rows][y_stride]
  uint32_t y_stride = 0;
  const float* bias = nullptr;  // [rows], or null
  bool add = false, activates = false;
  uint32_t act = 0;
};
void multiply_any(const Launch&, const Weight& w, AnyProduct p);

}  // namespace thimble::cuda
