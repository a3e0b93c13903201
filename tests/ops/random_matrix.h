// Random matrices of every tensor type, and their products in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "backends/cpu/kernels.h"
#include "base/dtype.h"
#include "tests/support/random_blocks.h"

namespace thimble::test {

// A random matrix as its bytes in a file and as floats; dequant_test checks the conversion.
struct Matrix {
  std::vector<std::byte> bytes;
  std::vector<float> values;
};

inline void read_values(Matrix& m, DType type, uint32_t rows, uint32_t cols) {
  for (uint32_t r = 0; r < rows; ++r)
    cpu::kernels().dequantize(type, m.bytes.data() + dtype_bytes(type, uint64_t(r) * cols), cols,
                              &m.values[size_t(r) * cols]);
}

inline Matrix random_matrix(Random& random, DType type, uint32_t rows, uint32_t cols) {
  const size_t n = size_t(rows) * cols;
  Matrix m{random_blocks(random, type, n), std::vector<float>(n)};
  read_values(m, type, rows, cols);
  return m;
}

struct Product {
  double sum, tolerance;
};
// Row c of W times row r of x. n products and n additions in f32 are each off by at most half an ulp of the
// sum of magnitudes. (Tensor cores truncate sums, but their products are exact.) Four more operations may
// follow: scale, bias, add, and K blocks.
//
// Rounding to f16 changes a number by at most 2^-11 of itself, or by 2^-25 if it is below 2^-14; zero stays.
// The row of x is first scaled so that its largest magnitude reaches 2^14, where 2^-25 is 2^-39 of the
// largest. (w + dw)(x + dx) is off by w dx + dw x + dw dx, mostly 2^-10 of itself.
inline Product product(const Matrix& w, uint32_t c, const float* x, uint32_t n, double bias, double before,
                       bool f16, double scale = 1) {
  double sum = 0, products = 0, largest = 0, rounded = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const double p = double{w.values[size_t(c) * n + i]} * double{x[i]};
    sum += p;
    products += std::fabs(p);
    largest = std::max(largest, std::fabs(double{x[i]}));
  }
  const auto rounding = [](double v, double least) { return v ? std::max(0x1p-11 * v, least) : 0; };
  for (uint32_t i = 0; f16 && i < n; ++i) {
    const double a = std::fabs(double{w.values[size_t(c) * n + i]}), b = std::fabs(double{x[i]});
    const double of_a = rounding(a, 0x1p-25), of_b = rounding(b, 0x1p-39 * largest);
    rounded += a * of_b + of_a * b + of_a * of_b;
  }
  rounded *= std::fabs(scale);
  const double magnitude = std::fabs(scale) * products + rounded + std::fabs(bias) + std::fabs(before);
  return {scale * sum + bias + before, (2 * n + 4) * 0x1p-24 * magnitude + rounded};
}

}  // namespace thimble::test
