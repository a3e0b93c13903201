// The inner loops of the KV ops. They are compiled once for each instruction set; kv_kernels() returns the
// best one for this machine.
//
// Keys are processed in transposed tiles of 64: tile[c][i] is channel c of key i. The dot products of a tile
// are then one small matrix product. A rotation by the key's index in the tile works the same for both
// pairings, and once transposed, f16 and f32 keys from lists or rows are handled alike.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace thimble::cpu {

constexpr uint32_t kTileKeys = 64;  // also the number of rows in the low half of the rotary table (backend.h)
constexpr uint32_t kPad = 16;       // floats in the widest vector; scratch rows are multiples of it

// How rows of keys or values of one type are stored and read (isa/kv_formats.h). A row has kv_bytes() bytes.
struct KvFormat {
  DType type;
  // Stores n channels. Values beyond the format's range are replaced by its largest number; returns how many
  // were replaced.
  uint32_t (*store_row)(const float* x, std::byte* row, uint32_t n);
  void (*load_row)(const std::byte* row, float* y, uint32_t n);
  // y[c][j] = channel c of row j, for n rows of `cols` channels; y is [cols][kTileKeys], with 0 past n.
  void (*load_tile)(const std::byte* const* rows, uint32_t n, uint32_t cols, float* y);
  // c += a * b. a is [m][kTileKeys], of which k columns are used; b has k rows of `cols` channels; c is
  // [m][ldc] with ldc = round_up(cols, kPad). Products are summed in ascending order.
  void (*add_rows)(uint32_t m, uint32_t k, const float* a, const std::byte* const* b, uint32_t cols, float* c,
                   uint32_t ldc);
};

struct KvKernels {
  const KvFormat* formats;
  uint32_t n_formats;
  // y = x as f16 for n values: the bounds of pages.
  void (*narrow)(const float* x, uint16_t* y, uint32_t n);

  // Rotates channels (first + p * step, second + p * step) of a transposed tile, for p < pairs. Key i is
  // rotated by the angle whose cos and sin are table[2p][i] and table[2p + 1][i]; the table is [2 *
  // pairs][kTileKeys].
  void (*rotate_tile)(float* tile, const float* table, uint32_t pairs, uint32_t second, uint32_t step);

  // c = a * tile, summed in ascending order. a is [m][k] with a row stride of lda elements, the tile
  // [k][kTileKeys], c [m][kTileKeys].
  void (*multiply_tile)(uint32_t m, uint32_t k, const float* a, uint32_t lda, const float* tile, float* c);
  // c = the largest value that the product can have for keys between those of two tiles, channel by channel.
  void (*bound_tile)(uint32_t m, uint32_t k, const float* a, uint32_t lda, const float* lowest,
                     const float* highest, float* c);
  // One tile of an online softmax in base 2. s is [m][kTileKeys]; row r sees its first visible[r] keys, the
  // others become 0. s = 2^(s - peak'), sum = sum 2^(peak - peak') + its row sum, and o [m][cols] is rescaled
  // in the same way.
  void (*soften)(float* s, uint32_t m, const uint32_t* visible, float* peak, float* sum, float* o,
                 uint32_t cols);

  // One tile of a softmax that needs only weights: s[i] = e^(s[i] - peak), where peak is the largest of the
  // first n; the other elements and NaN become 0. Returns the sum.
  float (*exponentials)(float* s, uint32_t n, float* peak);
  // log(sum(exp(s))) over n values; NaN counts as -inf. Blocks of 64 are summed in a fixed order.
  float (*log_sum_exp)(const float* s, uint32_t n);
  // y[i] = log(sum over rows h in ascending order of exp(s[h][i] - lse[h])); NaN counts as -inf.
  void (*vote)(const float* s, uint64_t stride, uint32_t rows, const float* lse, uint32_t n, float* y);
};

// The format for a type in the fastest set of kernels; null if rows cannot have the type.
const KvFormat* kv_format(DType);

// The fastest set of kernels that this processor supports.
const KvKernels& kv_kernels();
// One of the sets that this processor supports, in the order of kernel_sets() of kernels.h: for tests.
const KvKernels& kv_kernel_set(uint32_t set);

}  // namespace thimble::cpu
