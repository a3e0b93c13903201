// Integer products with quantised weights. A number of x is represented as an integer times a unit. The unit
// is a power of two that 32 consecutive numbers share. The integer has three digits in base 256, each a
// signed byte, which instructions multiply with the bytes of W.
//
// Error: a number is off by at most half a unit. The largest of the 32 reaches 2^22 units, or more than half
// of 127 * (1 + 256 + 256^2), so half a unit is at most 1.01 * 2^-23 of it. Sums of 4 to 16 products are
// exact, and so is a product of whole numbers. A dot product of floats rounds at each of its n products and
// sums, one of digits at most at every fourth. In rows of 1024 the errors of digits are up to 1.5 times those
// of floats; from 4096 on they are smaller (digits_test). The bits of a row's result do not depend on the
// other rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/kernels.h"
#include "base/dtype.h"

namespace thimble::cpu {

// 256 numbers of x. If the size of a row is not a multiple of 256, its last block holds the last 256 numbers,
// with zeros for those that the block before already holds. A row of fewer than 256 numbers is stored at the
// start of its block.
struct alignas(64) DigitBlock {
  float units[8];  // one per 32 numbers; NaN if one of them is infinite or NaN
  float sums[8];   // one per 32 numbers
  float units_of_16[16], sums_of_16[16];
  // The byte vectors, highest digits first. The length of a vector, and which numbers are in which vector,
  // depend on the instruction set (isa/bytes.h). The sums are those of a lane's integers over all vectors of
  // the same group.
  int8_t digits[3 * 256];
  int16_t words[2 * 256];       // two digits in base 4096, for signed bytes with AVX2 alone
  int32_t eightfold[32];        // 8 times sums in groups of 32
  int32_t eightfold_of_16[64];  // the same in groups of 16
  int32_t minus_high[32];       // -128 times the sums of the upper two digits, in groups of 32
  int32_t minus_low[32];        // the same of the lowest digit
};

// Blocks in a row of n numbers.
inline uint64_t digit_blocks(uint64_t n) { return (n + 255) / 256; }

constexpr uint32_t kMaxStreams = 4, kMaxStreamRows = 2;
// How many bytes ahead dot_streams() prefetches each row of W.
constexpr size_t kStreamsAhead = 2560;

struct DigitKernels {
  const char* name;
  // Up to this many rows, digits are faster than expanding W.
  uint32_t few_rows;
  // Rows of W that dot_streams() multiplies at once, at most kMaxStreams, and rows of x that it takes.
  uint32_t streams, stream_rows;
  // Up to this many numbers, dot() is faster for a single row.
  uint32_t narrow;
  // Whether dot() supports this type. If it supports none, the other functions are null.
  bool (*knows)(DType);
  // Converts a row of n numbers, a multiple of 32, to digit_blocks(n) blocks.
  void (*take)(const float* x, uint32_t n, DigitBlock* out);
  // out[r] = one row of W times row r of x, for x_rows <= kMaxDotRows rows, x_stride blocks apart.
  void (*dot)(DType, const std::byte* blocks, uint32_t n, const DigitBlock* x, size_t x_stride,
              uint32_t x_rows, float* out);
  // out[c * x_rows + r] = row c of W times row r of x, for `streams` rows of W that are w_stride bytes apart
  // and x_rows <= stream_rows rows. The bits equal those of dot(). x is read once for all rows of W: a row of
  // 4096 numbers fills a third of a first-level cache.
  void (*dot_streams)(DType, const std::byte* blocks, size_t w_stride, uint32_t n, const DigitBlock* x,
                      size_t x_stride, uint32_t x_rows, float* out);
};

// The fastest set of kernels that this processor supports.
const DigitKernels& digit_kernels();
// Every set that this processor supports, the fastest last: for tests.
uint32_t digit_kernel_sets(const DigitKernels* sets[4]);

}  // namespace thimble::cpu
