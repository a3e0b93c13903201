// Defines the table of kernels.h for one instruction set, in the variable THIMBLE_KERNELS. vector.h says what
// this file must not include.
#include "backends/cpu/kernels.h"

#include "backends/cpu/isa/dequant.h"
#include "backends/cpu/isa/vector.h"
#include "backends/op_params.h"

namespace thimble::cpu {
namespace {

// ---- block formats ----

template <typename Call>
inline void with_format(DType type, const Call& call) {
  switch (type) {
#define X(name, number, block, bytes) \
  case DType::k##name:                \
    return call(name());
    THIMBLE_DTYPES(X)
#undef X
  }
}

// Elements that expand() produces per call.
template <typename Format>
constexpr uint32_t kStep = Format::kBlock == 1 ? 2 * kLanes : Format::kBlock;
template <typename Format>
inline const std::byte* element(const std::byte* blocks, uint32_t i) {
  return blocks + size_t(i / Format::kBlock) * Format::kBytes;
}

void dequantize(DType type, const std::byte* blocks, uint32_t n, float* out) {
  with_format(type, [=](auto format) {
    using F = decltype(format);
    uint32_t i = 0;
    for (; i + kStep<F> <= n; i += kStep<F>)
      F::expand(element<F>(blocks, i), [=](int, int at, Vec v) { store(out + i + at, v); });
    if constexpr (F::kBlock == 1)
      for (; i < n; ++i) out[i] = F::one(element<F>(blocks, i));
  });
}

// ---- one row of W with a few rows of x ----

template <typename Format, int x_rows>
void dot_rows(const std::byte* blocks, uint32_t n, const float* x, size_t x_stride, float* out) {
  // Rows are contiguous in memory, and the processor's own prefetcher cannot keep up. Measured with q8_0 from
  // memory: 5.7 GB/s per core without this, 13.3 with it.
  constexpr size_t kAhead = 4096;
  Vec sums[x_rows][2] = {};  // two sums hide the latency of the additions
  float rest[x_rows] = {};
  uint32_t i = 0;
  const auto add_step = [&](const std::byte* from, uint32_t first) __attribute__((always_inline)) {
    Format::expand(
        from, [&](int slot, int at, Vec w) __attribute__((always_inline)) {
#pragma GCC unroll 4
          for (int r = 0; r < x_rows; ++r) sums[r][slot] += w * load(x + r * x_stride + first + at);
        });
  };
  // Take two short steps per iteration, so that loop overhead does not dominate.
  constexpr bool kTwo = kStep<Format> < 64;
  constexpr uint32_t kTurn = kTwo ? 2 * kStep<Format> : kStep<Format>;
  constexpr size_t kTurnBytes = kTurn / Format::kBlock * Format::kBytes;
  const std::byte* step = blocks;
  for (; i + kTurn <= n; i += kTurn, step += kTurnBytes) {
    for (size_t line = 0; line < kTurnBytes; line += 64) __builtin_prefetch(step + kAhead + line);
    add_step(step, i);
    if constexpr (kTwo) add_step(step + kTurnBytes / 2, i + kTurn / 2);
  }
  if (kTwo && i + kStep<Format> <= n) {
    add_step(step, i);
    i += kStep<Format>;
  }
  if constexpr (Format::kBlock == 1)
    for (; i < n; ++i)
      for (int r = 0; r < x_rows; ++r)
        rest[r] = multiply_add(Format::one(element<Format>(blocks, i)), x[r * x_stride + i], rest[r]);
  for (int r = 0; r < x_rows; ++r) out[r] = sum_lanes(sums[r][0] + sums[r][1]) + rest[r];
}

void dot(DType type, const std::byte* blocks, uint32_t n, const float* x, size_t x_stride, uint32_t x_rows,
         float* out) {
  with_format(type, [=](auto format) {
    using F = decltype(format);
    static_assert(kMaxDotRows == 4);
    constexpr decltype(&dot_rows<F, 1>) kRows[] = {dot_rows<F, 1>, dot_rows<F, 2>, dot_rows<F, 3>,
                                                   dot_rows<F, 4>};
    kRows[x_rows - 1](blocks, n, x, x_stride, out);
  });
}

// ---- matrix product ----

// A tile of kTileRows rows of x and kTileVecs vectors of columns is held in registers: all registers except
// those for the panel's vectors and the broadcast element. Measured on a Sapphire Rapids core: 12 x 2 of 16
// lanes 170 GFLOP/s (96 % of peak), 6 x 2 of 8 lanes 87; BLIS 0.9 76; OpenBLAS 0.3.21 32, with
// OPENBLAS_CORETYPE=SKYLAKEX 150.
constexpr int kTileVecs = 2;
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
#elif defined(__aarch64__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif
constexpr uint32_t kPanelCols = kTileVecs * kLanes;

typedef float Quad __attribute__((vector_size(16)));
typedef float LooseQuad __attribute__((vector_size(16), aligned(4), may_alias));
inline Quad load_quad(const float* p) { return *reinterpret_cast<const LooseQuad*>(p); }
inline void store_quad(float* p, Quad v) { *reinterpret_cast<LooseQuad*>(p) = v; }

void pack(DType type, const std::byte* blocks, size_t row_bytes, uint32_t rows, uint32_t n, float* panel) {
  // A piece of 256 elements is a whole number of blocks of any type, and this part of a panel fits the
  // first-level cache.
  constexpr uint32_t kPiece = 256;
  size_t piece_bytes = 0;
  with_format(type, [&](auto format) { piece_bytes = kPiece / format.kBlock * format.kBytes; });
  float line[4][kPiece];
  for (; n > 0; panel += kPiece * kPanelCols) {
    const uint32_t piece = n < kPiece ? n : kPiece;
    for (uint32_t row = 0; row < kPanelCols; row += 4) {
      for (uint32_t i = 0; i < 4; ++i) {
        if (row + i < rows)
          dequantize(type, blocks + (row + i) * row_bytes, piece, line[i]);
        else
          for (uint32_t k = 0; k < piece; ++k) line[i][k] = 0;
      }
      float* out = panel + row;
      uint32_t k = 0;
      for (; k + 4 <= piece; k += 4, out += 4 * kPanelCols) {
        const Quad a = load_quad(line[0] + k), b = load_quad(line[1] + k), c = load_quad(line[2] + k),
                   d = load_quad(line[3] + k);
        const Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
        const Quad cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
        const Quad ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        const Quad cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
        store_quad(out, __builtin_shufflevector(ab, cd, 0, 1, 4, 5));
        store_quad(out + kPanelCols, __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
        store_quad(out + 2 * kPanelCols, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
        store_quad(out + 3 * kPanelCols, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
      }
      for (; k < piece; ++k, out += kPanelCols)
        for (uint32_t i = 0; i < 4; ++i) out[i] = line[i][k];
    }
    n -= piece;
    blocks += piece_bytes;
  }
}

template <int rows>
void tile(const float* x, size_t x_stride, const float* panel, uint32_t n, uint32_t cols, float* y,
          size_t y_stride, bool accumulate) {
  Vec sums[rows][kTileVecs] = {};
  for (uint32_t k = 0; k < n; ++k, panel += kPanelCols) {
    Vec w[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) w[v] = load(panel + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const float element = x[r * x_stride + k];
      for (int v = 0; v < kTileVecs; ++v) sums[r][v] += element * w[v];
    }
  }
  for (int r = 0; r < rows; ++r) {
    float* to = y + r * y_stride;
    if (cols == kPanelCols) {
      for (int v = 0; v < kTileVecs; ++v)
        store(to + v * kLanes, accumulate ? load(to + v * kLanes) + sums[r][v] : sums[r][v]);
    } else {
      float edge[kPanelCols];
      for (int v = 0; v < kTileVecs; ++v) store(edge + v * kLanes, sums[r][v]);
      for (uint32_t c = 0; c < cols; ++c) to[c] = accumulate ? to[c] + edge[c] : edge[c];
    }
  }
}

// Calls tile<rows>; the template argument is found by counting down from kTileRows.
template <int rows = kTileRows>
inline void tile_of(uint32_t wanted, const float* x, size_t x_stride, const float* panel, uint32_t n,
                    uint32_t cols, float* y, size_t y_stride, bool accumulate) {
  if constexpr (rows > 0) {
    if (wanted >= rows) return tile<rows>(x, x_stride, panel, n, cols, y, y_stride, accumulate);
    tile_of<rows - 1>(wanted, x, x_stride, panel, n, cols, y, y_stride, accumulate);
  }
}

void multiply(const float* x, size_t x_stride, uint32_t x_rows, const float* panels, uint32_t n,
              uint32_t cols, float* y, size_t y_stride, bool accumulate) {
  // The rows of a tile stay in the first-level cache while all panels pass by from the second-level cache.
  for (uint32_t r = 0; r < x_rows; r += kTileRows)
    for (uint32_t c = 0; c < cols; c += kPanelCols)
      tile_of(x_rows - r, x + r * x_stride, x_stride, panels + size_t(c) * n, n,
              cols - c < kPanelCols ? cols - c : kPanelCols, y + r * y_stride + c, y_stride, accumulate);
}

// ---- elementwise ----

float mean_of(const float* x, uint32_t n) {
  Vec sums[4] = {};
  float rest = 0;
  uint32_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int v = 0; v < 4; ++v) sums[v] += load(x + i + v * kLanes);
  for (; i < n; ++i) rest += x[i];
  return (sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest) / static_cast<float>(n);
}

void rms_norm(const float* x, const float* weight, uint32_t n, float eps, bool center, bool add, float* y) {
  const float middle = center ? mean_of(x, n) : 0;
  Vec sums[4] = {};
  float rest = 0;
  uint32_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int v = 0; v < 4; ++v) {
      const Vec distance = load(x + i + v * kLanes) - middle;
      sums[v] += distance * distance;
    }
  for (; i < n; ++i) rest += (x[i] - middle) * (x[i] - middle);
  const float mean = (sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest) / static_cast<float>(n);
  const float scale = 1.0f / __builtin_sqrtf(mean + eps);
  for (i = 0; i < n; ++i) {
    const float normed = (x[i] - middle) * scale * (weight ? weight[i] : 1);
    y[i] = add ? y[i] + normed : normed;
  }
}

// tanh(x) = 2 sigmoid(2 x) - 1, with an error of up to 2^-23.
inline Vec capped(Vec x, float cap) { return cap * (2.0f / (1.0f + exp((-2.0f / cap) * x)) - 1.0f); }

void soft_cap(float* x, uint32_t n, float cap) {
  uint32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, capped(load(x + i), cap));
  if (i == n) return;
  float rest[kLanes] = {};
  for (uint32_t j = i; j < n; ++j) rest[j - i] = x[j];
  store(rest, capped(load(rest), cap));
  for (uint32_t j = i; j < n; ++j) x[j] = rest[j - i];
}

// silu is x * sigmoid(x); gelu's 0.5 x (1 + tanh u) is x * sigmoid(2 u).
inline Vec silu(Vec x) { return x / (1.0f + exp(-x)); }
inline Vec gelu(Vec x) {
  const Vec u2 = 1.59576912f * x * (1.0f + 0.044715f * x * x);  // 2 sqrt(2 / pi)
  return x / (1.0f + exp(-u2));
}

inline Vec relu_sqr(Vec x) {
  const Vec r = x < 0.0f ? Vec{} : x;  // NaN passes through
  return r * r;
}
inline Vec gelu_erf(Vec x) {  // erfc keeps bits that 1 + erf would round away
  Vec tail;
  for (int i = 0; i < kLanes; ++i) tail[i] = __builtin_erfcf(-0.707106781f * x[i]);  // 1 / sqrt(2)
  return 0.5f * x * tail;
}

template <Vec (*act)(Vec)>
inline void activate_with(float* x, const float* factor, uint32_t n) {
  uint32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec a = act(load(x + i));
    store(x + i, factor ? a * load(factor + i) : a);
  }
  if (i == n) return;
  float rest[kLanes] = {};
  for (uint32_t j = i; j < n; ++j) rest[j - i] = x[j];
  store(rest, act(load(rest)));
  for (uint32_t j = i; j < n; ++j) x[j] = factor ? rest[j - i] * factor[j] : rest[j - i];
}

void activate(uint32_t act, float* x, const float* factor, uint32_t n) {
  if (act == kActSilu)
    activate_with<silu>(x, factor, n);
  else if (act == kActGelu)
    activate_with<gelu>(x, factor, n);
  else if (act == kActReluSqr)
    activate_with<relu_sqr>(x, factor, n);
  else
    activate_with<gelu_erf>(x, factor, n);
}

double sum_exp(const float* x, uint32_t n, float shift) {
  double total = 0;
  while (n > 0) {
    // Pieces short enough that summing floats loses nothing that matters: 64 additions per lane.
    const uint32_t piece = n < 64 * kLanes ? n : 64 * kLanes;
    Vec sums = {};
    uint32_t i = 0;
    for (; i + kLanes <= piece; i += kLanes) sums += exp(load(x + i) - shift);
    for (; i < piece; ++i) total += static_cast<double>(exp(broadcast(x[i] - shift))[0]);
    total += static_cast<double>(sum_lanes(sums));
    x += piece;
    n -= piece;
  }
  return total;
}

}  // namespace

extern const Kernels THIMBLE_KERNELS;
const Kernels THIMBLE_KERNELS = {
#if defined(__AVX512F__)
    .name = "x86-64-v4",
    .flop_per_second = 170e9,
#elif defined(__AVX2__)
    .name = "x86-64-v3",
    .flop_per_second = 87e9,
#else
    .name = "baseline",
    .flop_per_second = 20e9,
#endif
    .dequantize = dequantize,
    .dot = dot,
    .panel_cols = kPanelCols,
    .pack = pack,
    .multiply = multiply,
    .rms_norm = rms_norm,
    .soft_cap = soft_cap,
    .activate = activate,
    .sum_exp = sum_exp,
};

}  // namespace thimble::cpu
