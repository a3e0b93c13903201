// The inner loops of the CPU backend. They are compiled once for each instruction set (isa/) and chosen at
// run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace thimble::cpu {

struct Kernels {
  const char* name;  // "x86-64-v4", ...
  // Approximate rate of one core in matrix products with these loops, for estimates.
  double flop_per_second;

  // out[i] = element i of a row of blocks. This is the definition of each format, which every backend
  // follows. `n` is a multiple of the block size.
  void (*dequantize)(DType, const std::byte* blocks, uint32_t n, float* out);
  // out[r] = one row of W times row r of x, for x_rows <= kMaxDotRows rows, x_stride apart.
  void (*dot)(DType, const std::byte* blocks, uint32_t n, const float* x, size_t x_stride, uint32_t x_rows,
              float* out);

  // The matrix product. A panel holds `panel_cols` rows of W as floats, transposed: panel[k][row].
  uint32_t panel_cols;
  // Packs elements of `rows` <= panel_cols rows of W, row_bytes apart, into panel[n][panel_cols], with zeros
  // after the last row. `line`: scratch of 4 * n floats.
  void (*pack)(DType, const std::byte* blocks, size_t row_bytes, uint32_t rows, uint32_t n, float* panel);
  // y[r][c] (+)= sum over k of x[r][k] * W[c][k], for ceil(cols / panel_cols) consecutive panels.
  void (*multiply)(const float* x, size_t x_stride, uint32_t x_rows, const float* panel, uint32_t n,
                   uint32_t cols, float* y, size_t y_stride, bool accumulate);

  // y = x / sqrt(mean(x^2) + eps) * weight, or y += that; y may be x.
  void (*rms_norm)(const float* x, const float* weight, uint32_t n, float eps, bool center, bool add,
                   float* y);
  // x = cap * tanh(x / cap).
  void (*soft_cap)(float* x, uint32_t n, float cap);
  // x = act(x), multiplied by `factor` unless it is null.
  void (*activate)(uint32_t act, float* x, const float* factor, uint32_t n);
  // The sum of exp(x - shift).
  double (*sum_exp)(const float* x, uint32_t n, float shift);
};

constexpr uint32_t kMaxDotRows = 4;

// The fastest set of kernels that this processor supports.
const Kernels& kernels();
// Every set that this processor supports, the fastest last: for tests.
uint32_t kernel_sets(const Kernels* sets[4]);

}  // namespace thimble::cpu
