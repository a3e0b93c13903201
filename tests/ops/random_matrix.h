// Random matrices of every tensor type, and their products in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backends/cpu/kernels.h"
#include "base/bits.h"
#include "base/dtype.h"
#include "tests/support/random.h"

namespace thimble::test {

// Where a type's block has halves: its scale, then its minimum. iq1_m's scale is in four parts, mxfp4's an
// exponent.
inline std::vector<size_t> halves_of(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kBF16:
    case DType::kMXFP4:
    case DType::kIQ1_M:
      return {};
    case DType::kQ4_1:
    case DType::kQ5_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
      return {0, 2};
    case DType::kQ2_K:
      return {80, 82};
    case DType::kQ3_K:
    case DType::kQ6_K:
    case DType::kTQ1_0:
    case DType::kTQ2_0:
      return {dtype_info(type).block_bytes - 2};
    default:
      return {0};
  }
}
inline void put_half(std::byte* at, float f) {
  const uint16_t h = f32_to_f16(f);
  std::memcpy(at, &h, sizeof h);
}
// iq1_m: a quarter of the scale at the top of each of four words.
inline void put_iq1_m_scale(std::byte* block, float f) {
  const uint32_t h = f32_to_f16(f);
  for (uint32_t i = 0; i < 4; ++i) {
    std::byte& top = block[49 + 2 * i];
    top = (top & std::byte{15}) | static_cast<std::byte>((h >> 4 * i & 15) << 4);
  }
}

// A random matrix as its bytes in a file and as floats, which dequant_test checks.
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
  const DTypeInfo& info = dtype_info(type);
  const size_t n = size_t(rows) * cols;
  Matrix m{std::vector<std::byte>(dtype_bytes(type, n)), std::vector<float>(n)};
  for (std::byte& b : m.bytes) b = static_cast<std::byte>(random.below(256));
  for (size_t block = 0; block < m.bytes.size(); block += info.block_bytes) {
    std::byte* at = &m.bytes[block];
    for (size_t half : halves_of(type)) put_half(at + half, random.uniform(-0.02f, 0.02f));
    const float f = random.uniform(-1, 1);
    if (type == DType::kF32) std::memcpy(at, &f, sizeof f);
    if (type == DType::kBF16) std::memcpy(at, reinterpret_cast<const std::byte*>(&f) + 2, 2);
    if (type == DType::kMXFP4) at[0] = static_cast<std::byte>(118 + random.below(8));
    if (type == DType::kIQ1_M) put_iq1_m_scale(at, 0.02f * f);
  }
  read_values(m, type, rows, cols);
  return m;
}

struct Product {
  double sum, tolerance;
};
// Row c of W times row r of x. n products and n additions in f32 are each off by at most half an ulp of the
// sum of magnitudes (tensor cores truncate sums, but their products are exact); three more operations may
// follow (bias, add, K blocks are among the n).
//
// Rounding to f16 moves a number by at most 2^-11 of itself, or by 2^-25 where it is below 2^-14; zero stays.
// The row of x is scaled before so that its largest magnitude reaches 2^14: there 2^-25 is 2^-39 of the
// largest. (w + dw)(x + dx) is off by w dx + dw x + dw dx, mostly 2^-10 of itself.
inline Product product(const Matrix& w, uint32_t c, const float* x, uint32_t n, double bias, double before,
                       bool f16) {
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
  const double magnitude = products + rounded + std::fabs(bias) + std::fabs(before);
  return {sum + bias + before, (2 * n + 3) * 0x1p-24 * magnitude + rounded};
}

}  // namespace thimble::test
