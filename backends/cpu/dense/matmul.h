// The matrix product of the dense ops, and how its work is divided among workers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "backends/cpu/digits.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

// One worker's part of a product: y[r][c] = sum over k of W[c][k] * x[r][k], or y += that. All matrix
// products of this backend go through it. For few rows W is used as stored in the file: with digits if there
// are any, otherwise as floats up to kMaxDotRows rows. For more rows W is expanded to floats in `scratch`
// (kMatmulScratch floats), at most kBlockCols rows and kBlockDepth elements at a time.
struct Matmul {
  const float* x;  // [x_rows][x_stride]
  size_t x_stride;
  uint32_t x_rows;
  DType type;
  const std::byte* w;  // [cols][n]
  uint32_t cols, n;
  float* y;  // [x_rows][y_stride]
  size_t y_stride;
  bool accumulate;
  const DigitBlock* digits = nullptr;  // of x: [x_rows][digit_blocks(n)], or null; not used by all types
};
void matmul(const Matmul&, float* scratch);
// Multiplies a block of y by the scale of its matrix.
inline void scale_block(float scale, uint32_t rows, uint32_t cols, float* y, size_t y_stride) {
  if (scale == 1) return;
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t i = 0; i < cols; ++i) y[r * y_stride + i] *= scale;
}
// Makes a BLAS allocate the memory that it keeps for the calling thread.
void warm_up_matmul();
// Bytes of that memory, measured once per process by the first caller; 0 without a BLAS.
uint64_t matmul_thread_bytes();

// 64 columns of 512 elements take 128 KiB of floats, which leaves room in any second-level cache.
constexpr uint32_t kBlockCols = 64, kBlockDepth = 512;
// Rows that share one expansion of W. The expansion costs about 3 % of the product of 1024 rows.
constexpr uint32_t kBlockRows = 1024;
constexpr uint32_t kMatmulScratch = kBlockCols * kBlockDepth;
// Floats of scratch per worker in linear and glu. After the matmul scratch, glu stores a block of its second
// product, and linear a block of a product that has a scale.
constexpr uint32_t kDenseScratch = kMatmulScratch + kBlockRows * kBlockCols;
inline float* dense_scratch(const Context& c, uint32_t worker) {
  return reinterpret_cast<float*>(c.scratch.data()) + size_t(worker) * kDenseScratch;
}

// Size in bytes of the digits of `rows` rows of n numbers.
inline uint64_t digit_bytes(uint64_t rows, uint64_t n) { return rows * digit_blocks(n) * sizeof(DigitBlock); }
// Computes the digits of `rows` rows of n numbers for one or two matrix types, in the scratch from `offset`
// on. Returns null in steps of more than few_rows, if no type has digit products, and for a row wider than
// the model's, which needs() did not count.
const DigitBlock* take_digits(const Context&, uint64_t offset, std::initializer_list<DType>, const float* x,
                              size_t x_stride, uint32_t rows, uint32_t n);

// A BLAS may sum in a different order for fewer rows.
#ifdef THIMBLE_BLAS
constexpr bool kSplitsRows = false;
#else
constexpr bool kSplitsRows = true;
#endif

// The blocks that the workers of linear and glu take. The division changes no result: every element is summed
// in the same order, and the choice of the few-rows path depends on the total number of rows.
class Blocks {
 public:
  struct Block {
    uint32_t first_row, rows, first_col, cols;
  };

  Blocks(uint32_t rows, uint32_t cols, uint32_t workers, bool digits) : rows_(rows), cols_(cols) {
    if (rows == 0 || cols == 0) return;
    if (rows <= kMaxDotRows || digits) {
      // Four items per worker balance their speeds, but with fewer than 64 rows of W the start of each item
      // costs more than that gains. Fewer than 16 rows are not worth another worker.
      const uint32_t share = (cols + workers - 1) / workers;
      block_cols_ = std::clamp(std::max((share + 3) / 4, std::min(share, 64u)), 16u, 4 * kBlockCols);
    } else {
      const uint32_t across = (cols + kBlockCols - 1) / kBlockCols;
      row_splits_ = (rows + kBlockRows - 1) / kBlockRows;
      // Narrow products are also split by rows, down to 64 rows. Each split expands W again.
      while (kSplitsRows && across * row_splits_ < 2 * workers && rows / (2 * row_splits_) >= 64)
        row_splits_ *= 2;
    }
    count_ = row_splits_ * ((cols + block_cols_ - 1) / block_cols_);
  }

  uint32_t count() const { return count_; }
  Block operator[](uint32_t item) const {
    const uint32_t split = item % row_splits_, col = item / row_splits_ * block_cols_;
    const auto border = [&](uint32_t i) { return static_cast<uint32_t>(uint64_t(rows_) * i / row_splits_); };
    return {border(split), border(split + 1) - border(split), col, std::min(block_cols_, cols_ - col)};
  }

 private:
  uint32_t rows_, cols_, block_cols_ = kBlockCols, row_splits_ = 1, count_ = 0;
};

}  // namespace thimble::cpu
