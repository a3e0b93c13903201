// Defines the table of mixer_kernels.h for one instruction set, in the variable THIMBLE_MIXER_KERNELS.
// vector.h says what this file must not include.
#include "backends/cpu/mixer_kernels.h"

#include "backends/cpu/isa/vector.h"

namespace thimble::cpu {
namespace {

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }
inline Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

// Calls body(i, n) for whole vectors of the range [0, count), n = kLanes, and once for the rest.
template <typename Body>
inline void for_vectors(uint32_t count, const Body& body) {
  uint32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, uint32_t(kLanes));
  if (i < count) body(i, count - i);
}
// The first n lanes; the others are zeros.
inline Vec load(const float* p, uint32_t n) {
  if (n == kLanes) return load(p);
  float lanes[kLanes] = {};
  for (uint32_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
inline void store(float* p, Vec v, uint32_t n) {
  if (n == kLanes) return store(p, v);
  float lanes[kLanes];
  store(lanes, v);
  for (uint32_t i = 0; i < n; ++i) p[i] = lanes[i];
}

void convolve(const ConvolvedRow& r) {
  for_vectors(r.n, [&](uint32_t i, uint32_t n) {
    Vec sum = r.bias ? load(r.bias + i, n) : Vec{};
    for (uint32_t j = 0; j < r.taps; ++j) {
      if (!r.x[j]) continue;
      const Vec x = load(r.x[j] + i, n);
      sum += load(r.w + j * r.w_stride + i, n) * (r.times[j] ? x * load(r.times[j] + i, n) : x);
    }
    if (r.silu) sum = silu(sum);
    store(r.y + i, r.gate ? load(r.gate + i, n) * sum : sum, n);
  });
}

void gate(const float* g, float* x, uint32_t count) {
  for_vectors(count,
              [&](uint32_t i, uint32_t n) { store(x + i, load(x + i, n) * sigmoid(load(g + i, n)), n); });
}

void gated_norm(const GatedNormParams& p, const float* x, const float* z, const float* weight, float* y) {
  const auto gate_of = [&](uint32_t i, uint32_t n) {
    const Vec of = load(z + i, n);
    return p.act == kActSilu ? silu(of) : sigmoid(of);
  };
  if (p.order != kNormThenGate)
    for_vectors(p.cols, [&](uint32_t i, uint32_t n) { store(y + i, load(x + i, n) * gate_of(i, n), n); });
  if (p.order == kGateOnly) return;
  const float* from = p.order == kNormThenGate ? x : y;
  Vec squares = {};
  for_vectors(p.cols, [&](uint32_t i, uint32_t n) { squares += load(from + i, n) * load(from + i, n); });
  const float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(p.cols) + p.eps);
  for_vectors(p.cols, [&](uint32_t i, uint32_t n) {
    Vec normed = scale * load(from + i, n);
    if (weight) normed *= load(weight + i, n);
    store(y + i, p.order == kNormThenGate ? normed * gate_of(i, n) : normed, n);
  });
}

// ---- the gated delta rule ----
// Widths are multiples of 32, and so of kLanes.

inline float dot(const float* a, const float* b, uint32_t n) {
  Vec sums[2] = {};
  for (uint32_t i = 0; i < n; i += 2 * kLanes)
    for (uint32_t v = 0; v < 2; ++v) sums[v] += load(a + i + v * kLanes) * load(b + i + v * kLanes);
  return sum_lanes(sums[0] + sums[1]);
}

// y = scale * x / sqrt(sum x^2 + eps)
inline void unit(const float* x, uint32_t n, float eps, float scale, float* y) {
  const float factor = scale / __builtin_sqrtf(dot(x, x, n) + eps);
  for (uint32_t i = 0; i < n; i += kLanes) store(y + i, factor * load(x + i));
}

inline float query_scale(const DeltaRows& d) { return 1.0f / __builtin_sqrtf(static_cast<float>(d.width)); }

// Moves the state before the rows to where it will be after them.
inline void take_state(const DeltaRows& d) {
  if (d.before == d.m) return;
  for (size_t i = 0; i < size_t(d.width) * d.width; i += kLanes)
    store(d.m + i, d.before ? load(d.before + i) : Vec{});
}

// Columns of the state that one pass over its rows works on: two sums for each are in registers.
#if defined(__AVX512F__)
constexpr int kStepVecs = 8;
#else
constexpr int kStepVecs = 4;
#endif
constexpr int kLeastVecs = 32 / kLanes;

// One row, for the columns of `vecs` vectors. With p = M^T k and r = M^T q of the state before,
//   delta = beta (v - e^gamma p);  y = e^gamma r + (k q) delta;  M = e^gamma M + k delta^T.
template <int vecs>
inline void step_columns(uint32_t width, const float* k, const float* q, float kq, const float* v,
                         float decay, float beta, const float* before, float* m, float* y) {
  Vec p[vecs] = {}, r[vecs] = {};
  for (uint32_t i = 0; i < width; ++i) {
    const float ki = k[i], qi = q[i];
#pragma GCC unroll 8
    for (int c = 0; c < vecs; ++c) {
      const Vec of = load(before + size_t(i) * width + c * kLanes);
      p[c] += ki * of;
      r[c] += qi * of;
    }
  }
  Vec delta[vecs];
  for (int c = 0; c < vecs; ++c) {
    delta[c] = beta * (load(v + c * kLanes) - decay * p[c]);
    store(y + c * kLanes, decay * r[c] + kq * delta[c]);
  }
  for (uint32_t i = 0; i < width; ++i) {
    const float ki = k[i];
#pragma GCC unroll 8
    for (int c = 0; c < vecs; ++c) {
      const size_t at = size_t(i) * width + c * kLanes;
      store(m + at, decay * load(before + at) + ki * delta[c]);
    }
  }
}

void delta_steps(const DeltaRows& d) {
  if (!d.before) take_state(d);
  const float* before = d.before ? d.before : d.m;
  float k[kMostDeltaWidth], q[kMostDeltaWidth];
  for (uint32_t row = 0; row < d.rows; ++row, before = d.m) {
    unit(d.k + row * d.stride, d.width, d.eps, 1, k);
    unit(d.q + row * d.stride, d.width, d.eps, query_scale(d), q);
    const float kq = dot(k, q, d.width);
    const float decay = exp(broadcast(d.gamma[row]))[0], beta = d.beta[row];
    const float* v = d.v + row * d.stride;
    float* y = d.y + row * d.y_stride;
    uint32_t c = 0;
    for (; c + kStepVecs * kLanes <= d.width; c += kStepVecs * kLanes)
      step_columns<kStepVecs>(d.width, k, q, kq, v + c, decay, beta, before + c, d.m + c, y + c);
    for (; c < d.width; c += kLeastVecs * kLanes)
      step_columns<kLeastVecs>(d.width, k, q, kq, v + c, decay, beta, before + c, d.m + c, y + c);
  }
}

// Products of small matrices: a tile of kTileRows rows and two vectors of columns is held in registers, as in
// kernels.cpp.
constexpr int kTileVecs = 2;
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif

// c = a b, or keep * c + a b if `adds`. Element (r, k) of a is a[r * row + k * depth_step].
struct Product {
  const float* a;
  size_t a_row, a_depth;
  const float* b;  // [depth][b_stride]
  size_t b_stride;
  uint32_t depth;
  float* c;
  size_t c_stride;
  float keep;
};
template <bool adds, int rows>
inline void tile(const Product& p, uint32_t row, uint32_t col) {
  Vec sums[rows][kTileVecs] = {};
  const float* a = p.a + row * p.a_row;
  const float* b = p.b + col;
  for (uint32_t k = 0; k < p.depth; ++k, a += p.a_depth, b += p.b_stride) {
    Vec of[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) of[v] = load(b + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const float element = a[r * p.a_row];
      for (int v = 0; v < kTileVecs; ++v) sums[r][v] += element * of[v];
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < kTileVecs; ++v) {
      float* to = p.c + (row + r) * p.c_stride + col + v * kLanes;
      store(to, adds ? p.keep * load(to) + sums[r][v] : sums[r][v]);
    }
}
template <bool adds, int rows = kTileRows>
inline void tile_of(uint32_t wanted, const Product& p, uint32_t row, uint32_t col) {
  if constexpr (rows > 0) {
    if (wanted >= rows) return tile<adds, rows>(p, row, col);
    tile_of<adds, rows - 1>(wanted, p, row, col);
  }
}
template <bool adds>
void multiply(uint32_t rows, uint32_t cols, const Product& p) {
  for (uint32_t col = 0; col < cols; col += kTileVecs * kLanes)
    for (uint32_t row = 0; row < rows; row += kTileRows) tile_of<adds>(rows - row, p, row, col);
}

// The rows of a chunk see each other through products of their keys, and the state before the chunk through
// one product with it. With G_i the sum of gamma up to row i and R_ij = e^(G_i - G_j) for j <= i:
//   N_i = beta_i (v_i - e^G_i M^T k_i) - sum over j < i of beta_i R_ij (k_i k_j) N_j
//   y_i = e^G_i M^T q_i + sum over j <= i of R_ij (q_i k_j) N_j
//   M = e^G_last M + sum over j of e^(G_last - G_j) k_j N_j^T
void delta_chunk(const DeltaRows& d) {
  constexpr uint32_t kMost = kDeltaChunk;
  const uint32_t n = d.rows, width = d.width;
  take_state(d);
  float* const units = d.scratch;               // [2 n][width]: keys, then queries
  float* const of_m = units + 2 * n * width;    // [2 n][width]: M^T of them
  float* const news = of_m + 2 * n * width;     // [n][width]: N
  float* const turned = news + n * width;       // [width][kMost]: keys, transposed
  float* const pairs = turned + width * kMost;  // [2 n][kMost]: products of keys and queries with keys
  float* const decays = pairs + 2 * n * kMost;  // [kMost]: e^G, and what R is made of
  float* const until_last = decays + kMost;     // [kMost]: e^(G_last - G)
  double sums[kMost];                           // G; differences of floats would lose bits of small gammas
  double sum = 0;
  for (uint32_t i = 0; i < kMost; ++i) {
    if (i < n) sum += static_cast<double>(d.gamma[i]);
    sums[i] = sum;
  }
  for (uint32_t i = 0; i < kMost; ++i) {
    decays[i] = static_cast<float>(sums[i]);
    until_last[i] = static_cast<float>(sum - sums[i]);
  }
  for (uint32_t i = 0; i < 2 * kMost; i += kLanes) store(decays + i, exp(load(decays + i)));

  for (uint32_t i = 0; i < n; ++i) {
    unit(d.k + i * d.stride, width, d.eps, 1, units + i * width);
    unit(d.q + i * d.stride, width, d.eps, query_scale(d), units + (n + i) * width);
    for (uint32_t c = 0; c < width; ++c) turned[c * kMost + i] = units[i * width + c];
  }
  for (uint32_t i = n; i < kMost; ++i)
    for (uint32_t c = 0; c < width; ++c) turned[c * kMost + i] = 0;
  multiply<false>(2 * n, width, {units, width, 1, d.m, width, width, of_m, width, 0});
  multiply<false>(2 * n, kMost, {units, width, 1, turned, kMost, width, pairs, kMost, 0});

  for (uint32_t i = 0; i < n; ++i) {
    float ratio[kMost];
    for (uint32_t j = 0; j < kMost; ++j) ratio[j] = j <= i ? static_cast<float>(sums[i] - sums[j]) : 0;
    for (uint32_t j = 0; j < kMost; j += kLanes) store(ratio + j, exp(load(ratio + j)));
    float* const keys = pairs + i * kMost;
    float* const queries = pairs + (n + i) * kMost;
    for (uint32_t j = 0; j <= i; ++j) {
      keys[j] *= d.beta[i] * ratio[j];
      queries[j] *= ratio[j];
    }
    const float decay = decays[i], beta = d.beta[i];
    for (uint32_t c = 0; c < width; c += kLeastVecs * kLanes) {
      Vec value[kLeastVecs], y[kLeastVecs];
      for (int v = 0; v < kLeastVecs; ++v) {
        const uint32_t at = c + v * kLanes;
        value[v] = beta * (load(d.v + i * d.stride + at) - decay * load(of_m + i * width + at));
        y[v] = decay * load(of_m + (n + i) * width + at);
      }
      for (uint32_t j = 0; j < i; ++j)
        for (int v = 0; v < kLeastVecs; ++v) {
          const Vec of = load(news + j * width + c + v * kLanes);
          value[v] -= keys[j] * of;
          y[v] += queries[j] * of;
        }
      for (int v = 0; v < kLeastVecs; ++v) {
        store(news + i * width + c + v * kLanes, value[v]);
        store(d.y + i * d.y_stride + c + v * kLanes, y[v] + queries[i] * value[v]);
      }
    }
  }
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t c = 0; c < width; c += kLanes)
      store(units + i * width + c, until_last[i] * load(units + i * width + c));
  multiply<true>(width, width, {units, 1, width, news, width, n, d.m, width, decays[kMost - 1]});
}

}  // namespace

extern const MixerKernels THIMBLE_MIXER_KERNELS;
const MixerKernels THIMBLE_MIXER_KERNELS = {
    .convolve = convolve,
    .delta_steps = delta_steps,
    .delta_chunk = delta_chunk,
    .gated_norm = gated_norm,
    .gate = gate,
};

}  // namespace thimble::cpu
