// The inner loops of the CPU backend: compiled once for each instruction set (isa/), chosen for this
// processor at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace thimble::cpu {

struct Kernels {
  const char* name;  // "x86-64-v4", ...
  // What a core reaches in matrix products with these loops, about: for estimates.
  double flop_per_second;

  // out[i] = element i of a row of blocks: the definition of each format, which every backend follows.
  // `n` is a multiple of the block.
  void (*dequantize)(DType, const std::byte* blocks, uint32_t n, float* out);
  // out[r] = one row of W times row r of x, for x_rows <= kMaxDotRows rows, x_stride apart.
  void (*dot)(DType, const std::byte* blocks, uint32_t n, const float* x, size_t x_stride, uint32_t x_rows,
              float* out);

  // The matrix product. A panel holds `panel_cols` rows of W as floats, element by element: panel[k][row].
  uint32_t panel_cols;
  // Packs elements of `rows` <= panel_cols rows of W, row_bytes apart, into panel[n][panel_cols], zeros where
  // rows end. `line`: scratch of 4 * n floats.
  void (*pack)(DType, const std::byte* blocks, size_t row_bytes, uint32_t rows, uint32_t n, float* panel);
  // y[r][c] (+)= sum over k of x[r][k] * W[c][k], for ceil(cols / panel_cols) panels that lie one after the
  // other.
  void (*multiply)(const float* x, size_t x_stride, uint32_t x_rows, const float* panel, uint32_t n,
                   uint32_t cols, float* y, size_t y_stride, bool accumulate);

  // y = x / sqrt(mean(x^2) + eps) * weight, or y += that; y may be x.
  void (*rms_norm)(const float* x, const float* weight, uint32_t n, float eps, bool add, float* y);
  // x = cap * tanh(x / cap).
  void (*soft_cap)(float* x, uint32_t n, float cap);
  // x = act(x), times `factor` where it is not null.
  void (*activate)(uint32_t act, float* x, const float* factor, uint32_t n);
  // Sum of exp(x - shift).
  double (*sum_exp)(const float* x, uint32_t n, float shift);
};

constexpr uint32_t kMaxDotRows = 4;

// The fastest set that this processor runs.
const Kernels& kernels();
// Every set that this processor runs, the last is the fastest: for tests.
uint32_t kernel_sets(const Kernels* sets[4]);

}  // namespace thimble::cpu
