// Products with quantised weights in integers. A number of x is an integer times a unit, a power of two that
// it shares with its 31 neighbours, and the integer has three digits of base 256, each a signed byte, which
// instructions multiply with the bytes of W.
//
// A number is off by at most half a unit. The largest of the 32 reaches 2^22 units, or more than half of
// 127 * (1 + 256 + 256^2): half a unit is at most 1.01 * 2^-23 of it. Sums of 4 to 16 products are exact, and
// so is a product of whole numbers. A dot of floats rounds at each of n products and sums, one of digits at
// each fourth at most: in rows of 1024 its errors are up to 1.5 times as large as those of floats, from 4096
// on smaller (digits_test). The bits of a row's result do not depend on the rows beside it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/kernels.h"
#include "base/dtype.h"

namespace thimble::cpu {

// 256 numbers of x. Where a row's are no multiple of 256, its last block holds the last of them, after zeros
// for those that the block before holds; a row of fewer than 256 begins its block.
struct alignas(64) DigitBlock {
  float units[8];  // of 32 numbers each; NaN where one of them is infinite or NaN
  float sums[8];   // of 32 numbers
  float units_of_16[16], sums_of_16[16];
  // For each vector of bytes, highest digits first. How long vectors are, and which numbers are in which, is
  // the instruction set's (isa/bytes.h). Sums are of a lane's integers, in all vectors that share its group.
  int8_t digits[3 * 256];
  int16_t words[2 * 256];       // two digits of base 4096, for signed bytes with AVX2 alone
  int32_t eightfold[32];        // 8 times sums in groups of 32
  int32_t eightfold_of_16[64];  // and in groups of 16
  int32_t minus_high[32];       // -128 times those of the upper two digits, in groups of 32
  int32_t minus_low[32];        // and of the lowest
};

// Blocks of a row of n numbers.
inline uint64_t digit_blocks(uint64_t n) { return (n + 255) / 256; }

constexpr uint32_t kMaxStreams = 4, kMaxStreamRows = 2;
// So many bytes ahead dot_streams() asks for each row of W.
constexpr size_t kStreamsAhead = 2560;

struct DigitKernels {
  const char* name;
  // Up to so many rows are multiplied faster than by expanding W.
  uint32_t few_rows;
  // Rows of W that dot_streams() multiplies at once, at most kMaxStreams, and rows of x.
  uint32_t streams, stream_rows;
  // One row of so many numbers is multiplied faster by dot().
  uint32_t narrow;
  // Whether dot() takes this type; if none, there is nothing else either.
  bool (*knows)(DType);
  // A row of n numbers, a multiple of 32, to digit_blocks(n) blocks.
  void (*take)(const float* x, uint32_t n, DigitBlock* out);
  // out[r] = one row of W times row r of x, for x_rows <= kMaxDotRows rows, x_stride blocks apart.
  void (*dot)(DType, const std::byte* blocks, uint32_t n, const DigitBlock* x, size_t x_stride,
              uint32_t x_rows, float* out);
  // out[c * x_rows + r] = row c of `streams` rows of W, w_stride bytes apart, times row r of x, for x_rows <=
  // stream_rows rows: the same bits as dot()'s. x is read once for all rows of W: a row of 4096 numbers fills
  // a third of a first-level cache.
  void (*dot_streams)(DType, const std::byte* blocks, size_t w_stride, uint32_t n, const DigitBlock* x,
                      size_t x_stride, uint32_t x_rows, float* out);
};

// The fastest set that this processor runs.
const DigitKernels& digit_kernels();
// Every set that this processor runs, the last is the fastest: for tests.
uint32_t digit_kernel_sets(const DigitKernels* sets[4]);

}  // namespace thimble::cpu
