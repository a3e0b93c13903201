// The inner loops of the KV ops, compiled once for each instruction set; kv_kernels() is the best this
// machine runs.
//
// Keys are worked on in tiles of 64, transposed: tile[c][i] is channel c of key i. So the dot products of a
// tile are one small matrix product, a rotation by the key's place in the tile works the same for both
// pairings, and f16 or f32 keys, in lists or in rows, are all the same from there on.
#pragma once

#include <cstdint>

namespace thimble::cpu {

constexpr uint32_t kTileKeys = 64;  // also the number of rows in the low half of the rotary table (backend.h)
constexpr uint32_t kPad = 16;       // floats of the widest vector; scratch rows are multiples of it

struct KvKernels {
  // y = x, f16 to f32 and back, n values.
  void (*widen)(const uint16_t* x, float* y, uint32_t n);
  void (*narrow)(const float* x, uint16_t* y, uint32_t n);
  // The same where what is beyond f16's range becomes its largest number; returns how many were. NaN stays.
  uint32_t (*saturate)(const float* x, uint16_t* y, uint32_t n);

  // y[c][j] = element c of the j-th row, as f32, for n rows of `cols` elements; [cols][kTileKeys], 0 past n.
  void (*transpose_f16)(const uint16_t* const* rows, uint32_t n, uint32_t cols, float* y);
  void (*transpose_f32)(const float* const* rows, uint32_t n, uint32_t cols, float* y);

  // Rotates channels (first + p * step, second + p * step) of a transposed tile, for p < pairs; key i by the
  // angle whose cos and sin are table[2p][i] and table[2p + 1][i], [2 * pairs][kTileKeys].
  void (*rotate_tile)(float* tile, const float* table, uint32_t pairs, uint32_t second, uint32_t step);

  // c = a tile: a is [m][k] with lda elements from row to row, the tile [k][kTileKeys], c [m][kTileKeys].
  void (*multiply_tile)(uint32_t m, uint32_t k, const float* a, uint32_t lda, const float* tile, float* c);
  // c = the largest that the product can be with keys between those of two tiles, channel by channel.
  void (*bound_tile)(uint32_t m, uint32_t k, const float* a, uint32_t lda, const float* lowest,
                     const float* highest, float* c);
  // c += a b: a is [m][kTileKeys], of which k count, b has k rows of `cols` elements, c is [m][ldc] with
  // ldc = round_up(cols, kPad). All products sum in ascending order.
  void (*add_rows_f16)(uint32_t m, uint32_t k, const float* a, const uint16_t* const* b, uint32_t cols,
                       float* c, uint32_t ldc);
  void (*add_rows_f32)(uint32_t m, uint32_t k, const float* a, const float* const* b, uint32_t cols, float* c,
                       uint32_t ldc);

  // One tile of an online softmax in base 2. s is [m][kTileKeys]; row r sees its first visible[r] keys, the
  // others become 0. s = 2^(s - peak'), sum = sum 2^(peak - peak') + its row sum, and o [m][cols] is rescaled
  // likewise.
  void (*soften)(float* s, uint32_t m, const uint32_t* visible, float* peak, float* sum, float* o,
                 uint32_t cols);

  // One tile of a softmax that needs no more than weights: s[i] = e^(s[i] - peak), peak being the largest of
  // the first n; 0 for the others and NaN. Returns their sum.
  float (*exponentials)(float* s, uint32_t n, float* peak);
  // log(sum(exp(s))) over n values; NaN counts as -inf. Sums of blocks of 64 in fixed order.
  float (*log_sum_exp)(const float* s, uint32_t n);
  // y[i] = log(sum over rows h in ascending order of exp(s[h][i] - lse[h])), NaN counting as -inf.
  void (*vote)(const float* s, uint64_t stride, uint32_t rows, const float* lse, uint32_t n, float* y);
};

// The fastest set that this processor runs.
const KvKernels& kv_kernels();
// One of the sets that this processor runs, numbered as kernel_sets() in kernels.h does: for tests.
const KvKernels& kv_kernel_set(uint32_t set);

}  // namespace thimble::cpu
