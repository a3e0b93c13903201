// How the products of experts are divided among workers. The slots of an expert are contiguous, and its
// matrices are multiplied for kExpertRows of them at a time.
#pragma once

#include "backends/cpu/dense/matmul.h"

namespace thimble::cpu {

// Slots that share one expansion of W. With 128 the expansion costs a quarter of the product.
constexpr uint32_t kExpertRows = 128;

// Floats of scratch per worker in the expert ops: for matmul, for a block of results, and for the rows that a
// block of slots uses.
inline uint64_t expert_scratch(uint32_t in_cols) {
  return kMatmulScratch + uint64_t(kExpertRows) * kBlockCols + uint64_t(kExpertRows) * in_cols;
}
struct ExpertScratch {
  float *matmul, *block, *rows;
  ExpertScratch(const Context& c, uint32_t worker, uint32_t in_cols)
      : matmul(reinterpret_cast<float*>(c.scratch.data()) + worker * expert_scratch(in_cols)),
        block(matmul + kMatmulScratch),
        rows(block + kExpertRows * kBlockCols) {}
};

// How many of `all` columns a worker takes at a time. With digits a product is as fast as W can be read, and
// longer stretches of W lose less at their ends; two items per worker balance their speeds. Steps with digits
// have few rows, so the results fit the block of ExpertScratch.
inline uint32_t expert_cols(uint64_t all, uint32_t workers, bool digits) {
  return digits ? static_cast<uint32_t>(std::clamp<uint64_t>(all / (2 * workers), kBlockCols, 4 * kBlockCols))
                : kBlockCols;
}

// y[r][i] = row first_col + i of the matrix of `expert` times x[r] and the expert's scale, for `cols` of its
// rows. The matrix of the next expert begins matrix_rows rows after that of an expert.
struct ExpertProduct {
  const Weight& w;
  const In& scale;
  uint32_t expert, matrix_rows, first_col, cols, in_cols;
  void operator()(const float* x, const DigitBlock* digits, uint32_t x_rows, float* y, size_t y_stride,
                  float* scratch) const {
    const uint64_t row = uint64_t(expert) * matrix_rows + first_col;
    matmul({.x = x,
            .x_stride = in_cols,
            .x_rows = x_rows,
            .type = w.type,
            .w = data<std::byte>(w) + row * dtype_bytes(w.type, in_cols),
            .cols = cols,
            .n = in_cols,
            .y = y,
            .y_stride = y_stride,
            .accumulate = false,
            .digits = digits},
           scratch);
    scale_block(scale ? data<float>(scale)[expert] : 1, x_rows, cols, y, y_stride);
  }
};

// Adds an expert's bias, if it has one.
inline void add_bias(const In& bias, uint64_t first, uint32_t rows, uint32_t cols, float* y,
                     size_t y_stride) {
  if (!bias) return;
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t i = 0; i < cols; ++i) y[r * y_stride + i] += data<float>(bias)[first + i];
}

}  // namespace thimble::cpu
