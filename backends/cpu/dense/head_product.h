// Products with the matrices of heads.
#pragma once

#include "backends/cpu/dense/matmul.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

// Rows times one head's matrix: [out_cols][in_cols], or transposed.
struct HeadProduct {
  const float* x;  // [rows][x_stride]
  size_t x_stride;
  uint32_t rows, in_cols, out_cols;
  const Weight& w;
  uint64_t first_row;  // of the head's matrix in w
  bool transposed;
  float* y;  // [rows][y_stride]
  size_t y_stride;
};

// The outputs that a worker computes at once: all of a transposed matrix.
inline uint32_t head_block(const HeadProduct& p) { return p.transposed ? p.out_cols : kBlockCols; }
// Computes the outputs of one such block, from output `first` on.
void multiply_head(const HeadProduct&, uint32_t first, float* scratch);

}  // namespace thimble::cpu
