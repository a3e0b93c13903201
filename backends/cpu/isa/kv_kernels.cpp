// Defines the table of kv_kernels.h for one instruction set, in the variable THIMBLE_KV_KERNELS. vector.h
// says what this file must not include.
#include "backends/cpu/kv_kernels.h"

#include <utility>

#include "backends/cpu/isa/kv_formats.h"
#include "backends/cpu/isa/vector.h"

namespace thimble::cpu {
namespace {

// An accumulator block of 6 rows fills 24 of the 32 registers of AVX-512, or 12 of the 16 of other sets.
constexpr uint32_t kBlockRows = 6, kBlockCols = kLanes == 16 ? 4 : 2;
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));
constexpr float kInfinity = __builtin_inff();

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// The lanes of a and b whose index has bit G clear (Second: set); lanes come from a if the result's index has
// bit G clear. Exchanging all pairs of vectors this way for every G transposes kLanes vectors.
template <int G, bool Second, int... I>
inline Vec pick(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & G ? kLanes + (I ^ G) : I) + (Second ? G : 0))...);
}
template <int G>
inline void exchange(Vec (&v)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & G) continue;
    const Vec a = v[i], b = v[i + G];
    v[i] = pick<G, false>(a, b, std::make_integer_sequence<int, kLanes>());
    v[i + G] = pick<G, true>(a, b, std::make_integer_sequence<int, kLanes>());
  }
}

template <int Step = kLanes / 2>
inline float max_lanes(Vec a) {
  if constexpr (Step == 0)
    return a[0];
  else
    return max_lanes<Step / 2>(max(a, moved<Step>(a, std::make_integer_sequence<int, kLanes>())));
}

// 2^x for x <= 0; 0 below -127. Half the work of exp(), which matters in attention's inner loop. The
// polynomial approximates 2^f on |f| <= 1/2 with an error of 2e-9, which is below the rounding of its
// evaluation.
inline Vec exp2(Vec x) {
  x = x < -127.0f ? broadcast(-127.0f) : x;
  const Vec shifted = x + 0x1.8p23f;  // adding 1.5 * 2^23 rounds x to an integer in the low bits
  const Vec f = x - (shifted - 0x1.8p23f);
  Vec p = broadcast(0.00015345811f);
  p = p * f + 0.0013399932f;
  p = p * f + 0.009618489f;
  p = p * f + 0.055503286f;
  p = p * f + 0.24022646f;
  p = p * f + 0.6931472f;
  p = p * f + 1.0f;
  return p * reinterpret_cast<Vec>((reinterpret_cast<BitVec>(shifted) + 127u) << 23);
}

// log(x) for normal positive x: the exponent plus 2 atanh((m - 1) / (m + 1)) for m in [sqrt(1/2), sqrt(2)).
// There the argument is at most 0.172, and the first omitted term of the series is 1e-9.
inline Vec log(Vec x) {
  constexpr int32_t kRootHalf = 0x3f3504f3;
  const IntVec bits = reinterpret_cast<IntVec>(x);
  const IntVec exponent = (bits - kRootHalf) >> 23;
  const Vec m = reinterpret_cast<Vec>(bits - (exponent << 23));
  const Vec t = (m - 1.0f) / (m + 1.0f), t2 = t * t;
  const Vec series = (((t2 * (1 / 9.0f) + 1 / 7.0f) * t2 + 1 / 5.0f) * t2 + 1 / 3.0f) * t2 + 1.0f;
  return __builtin_convertvector(exponent, Vec) * 0.693147181f + 2.0f * t * series;
}

void narrow(const float* x, uint16_t* y, uint32_t n) {
  uint32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, load(x + i));
  if (i < n) store_some(y + i, load_some<float>(x + i, n - i, 0), n - i);
}

// Transposes kLanes rows of kLanes columns from column c on; rows of y are kTileKeys apart.
template <typename Format>
inline void transpose_block(const std::byte* const* rows, uint32_t c, float* y) {
  Vec v[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) v[i] = Format::load(rows[i], c);
  exchange<1>(v);
  exchange<2>(v);
  if constexpr (kLanes > 4) exchange<4>(v);
  if constexpr (kLanes > 8) exchange<8>(v);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(y + i * kTileKeys, v[i]);
}

// Blocks of rows of `cols` channels as floats, for formats that load a block as a whole.
struct BlockTile {
  float values[kTileKeys][kBlock];
  const std::byte* rows[kTileKeys];

  template <typename Format>
  void load(const std::byte* const* from, uint32_t n, uint32_t cols, uint32_t c) {
    for (uint32_t i = 0; i < n; ++i) {
      Format::load_block(from[i], cols, c, values[i]);
      rows[i] = reinterpret_cast<const std::byte*>(values[i]);
    }
  }
};

template <typename Format>
void load_tile(const std::byte* const* rows, uint32_t n, uint32_t cols, float* y) {
  if constexpr (WholeBlocks<Format>) {
    BlockTile block;
    for (uint32_t c = 0; c < cols; c += kBlock) {
      block.load<Format>(rows, n, cols, c);
      load_tile<FloatRows>(block.rows, n, kBlock, y + c * kTileKeys);
    }
    return;
  } else {
    for (uint32_t j = 0; j < kTileKeys; j += kLanes, y += kLanes)
      for (uint32_t c = 0; c < cols; c += kLanes) {
        if (j + kLanes <= n && c + kLanes <= cols) {
          transpose_block<Format>(rows + j, c, y + c * kTileKeys);
          continue;
        }
        const uint32_t channels = cols - c < kLanes ? cols - c : kLanes;
        float edge[kLanes][kLanes] = {};
        const std::byte* edge_rows[kLanes];
        for (uint32_t i = 0; i < kLanes; ++i) {
          edge_rows[i] = reinterpret_cast<const std::byte*>(edge[i]);
          if (j + i < n) store(edge[i], Format::load_some(rows[j + i], c, channels));
        }
        float block[kLanes * kTileKeys];
        transpose_block<FloatRows>(edge_rows, 0, block);
        for (uint32_t x = 0; x < channels; ++x) store(y + (c + x) * kTileKeys, load(block + x * kTileKeys));
      }
  }
}

void rotate_tile(float* tile, const float* table, uint32_t pairs, uint32_t second, uint32_t step) {
  for (uint32_t p = 0; p < pairs; ++p) {
    float* a = tile + p * step * kTileKeys;
    float* b = a + second * kTileKeys;
    const float* cos = table + 2 * p * kTileKeys;
    const float* sin = cos + kTileKeys;
    for (uint32_t i = 0; i < kTileKeys; i += kLanes) {
      const Vec x = load(a + i), y = load(b + i), c = load(cos + i), s = load(sin + i);
      store(a + i, x * c - y * s);
      store(b + i, x * s + y * c);
    }
  }
}

// The right factor of a product, read in vectors: a tile, or rows at any addresses.
struct Tile {
  const float* x;
  Vec at(uint32_t k, uint32_t c) const { return load(x + k * kTileKeys + c); }
};
template <typename Format>
struct Listed {
  const std::byte* const* rows;
  uint32_t cols;
  Vec at(uint32_t k, uint32_t c) const {
    if (c + kLanes <= cols) return Format::load(rows[k], c);
    return c < cols ? Format::load_some(rows[k], c, cols - c) : Vec{};
  }
};

// Computes Rows x (Cols vectors) of c, from column `first` on.
template <uint32_t Rows, uint32_t Cols, bool Add, typename B>
void multiply_block(uint32_t k, const float* a, uint32_t lda, const B& b, uint32_t first, float* c,
                    uint32_t ldc) {
  Vec sums[Rows][Cols];
#pragma GCC unroll 6
  for (uint32_t r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (uint32_t v = 0; v < Cols; ++v) sums[r][v] = Add ? load(c + r * ldc + first + v * kLanes) : Vec{};
  for (uint32_t i = 0; i < k; ++i) {
    Vec x[Cols];
#pragma GCC unroll 4
    for (uint32_t v = 0; v < Cols; ++v) x[v] = b.at(i, first + v * kLanes);
#pragma GCC unroll 6
    for (uint32_t r = 0; r < Rows; ++r) {
      const float w = a[r * lda + i];
#pragma GCC unroll 4
      for (uint32_t v = 0; v < Cols; ++v) sums[r][v] += w * x[v];
    }
  }
#pragma GCC unroll 6
  for (uint32_t r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (uint32_t v = 0; v < Cols; ++v) store(c + r * ldc + first + v * kLanes, sums[r][v]);
}

template <uint32_t Cols, bool Add, typename B>
void multiply_columns(uint32_t m, uint32_t k, const float* a, uint32_t lda, const B& b, uint32_t first,
                      float* c, uint32_t ldc) {
  for (; m >= kBlockRows; m -= kBlockRows, a += kBlockRows * lda, c += kBlockRows * ldc)
    multiply_block<kBlockRows, Cols, Add>(k, a, lda, b, first, c, ldc);
  switch (m) {
    case 5:
      return multiply_block<5, Cols, Add>(k, a, lda, b, first, c, ldc);
    case 4:
      return multiply_block<4, Cols, Add>(k, a, lda, b, first, c, ldc);
    case 3:
      return multiply_block<3, Cols, Add>(k, a, lda, b, first, c, ldc);
    case 2:
      return multiply_block<2, Cols, Add>(k, a, lda, b, first, c, ldc);
    case 1:
      return multiply_block<1, Cols, Add>(k, a, lda, b, first, c, ldc);
  }
}

void multiply_tile(uint32_t m, uint32_t k, const float* a, uint32_t lda, const float* tile, float* c) {
  for (uint32_t first = 0; first < kTileKeys; first += kBlockCols * kLanes)
    multiply_columns<kBlockCols, false>(m, k, a, lda, Tile{tile}, first, c, kTileKeys);
}

void bound_tile(uint32_t m, uint32_t k, const float* a, uint32_t lda, const float* lowest,
                const float* highest, float* c) {
  constexpr uint32_t kVectors = kTileKeys / kLanes;
  for (uint32_t r = 0; r < m; ++r, a += lda, c += kTileKeys) {
    Vec sums[kVectors] = {};
    for (uint32_t i = 0; i < k; ++i) {
      // Picks the larger of the two products
      const float* keys = (a[i] < 0 ? lowest : highest) + i * kTileKeys;
#pragma GCC unroll 16
      for (uint32_t v = 0; v < kVectors; ++v) sums[v] += a[i] * load(keys + v * kLanes);
    }
#pragma GCC unroll 16
    for (uint32_t v = 0; v < kVectors; ++v) store(c + v * kLanes, sums[v]);
  }
}

template <typename Format>
void add_rows(uint32_t m, uint32_t k, const float* a, const std::byte* const* rows, uint32_t cols, float* c,
              uint32_t ldc) {
  if constexpr (WholeBlocks<Format>) {
    BlockTile block;
    const Listed<FloatRows> b{block.rows, kBlock};
    for (uint32_t at = 0; at < cols; at += kBlock) {
      block.load<Format>(rows, k, cols, at);
      for (uint32_t first = 0; first < kBlock; first += 2 * kLanes)
        multiply_columns<2, true>(m, k, a, kTileKeys, b, first, c + at, ldc);
    }
    return;
  } else {
    const Listed<Format> b{rows, cols};
    uint32_t first = 0;
    for (; first + kBlockCols * kLanes <= ldc; first += kBlockCols * kLanes)
      multiply_columns<kBlockCols, true>(m, k, a, kTileKeys, b, first, c, ldc);
    for (; first < ldc; first += kLanes) multiply_columns<1, true>(m, k, a, kTileKeys, b, first, c, ldc);
  }
}

void soften(float* s, uint32_t m, const uint32_t* visible, float* peak, float* sum, float* o, uint32_t cols) {
  for (uint32_t r = 0; r < m; ++r, s += kTileKeys, o += cols) {
    if (visible[r] == 0) {
      for (uint32_t i = 0; i < kTileKeys; ++i) s[i] = 0;
      continue;
    }
    for (uint32_t i = visible[r]; i < kTileKeys; ++i) s[i] = -kInfinity;
    Vec highest = load(s);
    for (uint32_t i = kLanes; i < kTileKeys; i += kLanes) highest = max(highest, load(s + i));
    const float top = max_lanes(highest);
    if (top > peak[r]) {
      const Vec shrink = exp2(broadcast(peak[r] - top));
      peak[r] = top;
      sum[r] *= shrink[0];
      for (uint32_t i = 0; i < cols; i += kLanes) store(o + i, load(o + i) * shrink);
    }
    Vec total{};
    for (uint32_t i = 0; i < kTileKeys; i += kLanes) {
      const Vec p = exp2(load(s + i) - peak[r]);
      store(s + i, p);
      total += p;
    }
    sum[r] += sum_lanes(total);
  }
}

inline Vec nan_is_lowest(Vec x) { return x == x ? x : broadcast(-kInfinity); }

float exponentials(float* s, uint32_t n, float* peak) {
  for (uint32_t i = n; i < kTileKeys; ++i) s[i] = -kInfinity;
  Vec highest = broadcast(-kInfinity);
  for (uint32_t i = 0; i < kTileKeys; i += kLanes) highest = max(nan_is_lowest(load(s + i)), highest);
  *peak = max_lanes(highest);
  Vec total{};
  for (uint32_t i = 0; i < kTileKeys; i += kLanes) {
    const Vec p = exp(nan_is_lowest(load(s + i) - *peak));  // -inf - -inf would be NaN
    store(s + i, p);
    total += p;
  }
  return sum_lanes(total);
}

float log_sum_exp(const float* s, uint32_t n) {
  const auto at = [&](uint32_t i) {
    return nan_is_lowest(i + kLanes <= n ? load(s + i) : load_some<float>(s + i, n - i, -kInfinity));
  };
  Vec highest = broadcast(-kInfinity);
  for (uint32_t i = 0; i < n; i += kLanes) highest = max(highest, at(i));
  const float top = max_lanes(highest);
  if (top == -kInfinity) return top;
  float sum = 0;
  for (uint32_t first = 0; first < n; first += 64) {
    Vec block{};
    for (uint32_t i = first; i < first + 64 && i < n; i += kLanes) block += exp(at(i) - top);
    sum += sum_lanes(block);
  }
  return top + __builtin_logf(sum);
}

void vote(const float* s, uint64_t stride, uint32_t rows, const float* lse, uint32_t n, float* y) {
  for (uint32_t i = 0; i < n; i += kLanes) {
    const bool whole = i + kLanes <= n;
    const auto at = [&](uint32_t h) {
      const float* x = s + h * stride + i;
      return nan_is_lowest((whole ? load(x) : load_some<float>(x, n - i, -kInfinity)) - lse[h]);
    };
    Vec top = at(0);
    for (uint32_t h = 1; h < rows; ++h) top = max(top, at(h));
    Vec sum{};
    const Vec base = top == -kInfinity ? Vec{} : top;  // -inf - -inf would be NaN
    for (uint32_t h = 0; h < rows; ++h) sum += exp(at(h) - base);
    const Vec result = top == -kInfinity ? top : top + log(sum);
    if (whole)
      store(y + i, result);
    else
      store_some(y + i, result, n - i);
  }
}

template <typename Format>
constexpr KvFormat format() {
  return {.type = Format::kType,
          .store_row = Format::store_row,
          .load_row = load_row<Format>,
          .load_tile = load_tile<Format>,
          .add_rows = add_rows<Format>};
}

template <typename List>
struct FormatTable;
template <typename... Formats>
struct FormatTable<FormatList<Formats...>> {
  static constexpr KvFormat kRows[] = {format<Formats>()...};
  static constexpr uint32_t kCount = sizeof...(Formats);
};

}  // namespace

extern const KvKernels THIMBLE_KV_KERNELS;
const KvKernels THIMBLE_KV_KERNELS = {
    .formats = FormatTable<AllFormats>::kRows,
    .n_formats = FormatTable<AllFormats>::kCount,
    .narrow = narrow,
    .rotate_tile = rotate_tile,
    .multiply_tile = multiply_tile,
    .bound_tile = bound_tile,
    .soften = soften,
    .exponentials = exponentials,
    .log_sum_exp = log_sum_exp,
    .vote = vote,
};

}  // namespace thimble::cpu
