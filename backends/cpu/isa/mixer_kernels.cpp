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

// ---- states ----

// Moves `count` floats of the state before the rows to where it will be after them.
inline void take_state(const float* before, float* after, size_t count) {
  if (before == after) return;
  for (size_t i = 0; i < count; i += kLanes) store(after + i, before ? load(before + i) : Vec{});
}

// Decays of a chunk's rows, with G_i the sum of the exponents up to row i. From row n on, exponents are 0.
struct Decays {
  double sums[kMixerChunk];  // G; differences of floats would lose bits of small exponents
  float until[kMixerChunk];  // e^G
  float after[kMixerChunk];  // e^(G_last - G)
  float last() const { return until[kMixerChunk - 1]; }

  Decays(const float* exponents, uint32_t n) {
    double sum = 0;
    for (uint32_t i = 0; i < kMixerChunk; ++i) {
      if (i < n) sum += static_cast<double>(exponents[i]);
      sums[i] = sum;
    }
    for (uint32_t i = 0; i < kMixerChunk; ++i) {
      until[i] = static_cast<float>(sums[i]);
      after[i] = static_cast<float>(sum - sums[i]);
    }
    exponentials(until);
    exponentials(after);
  }
  // ratio[j] = e^(G_i - G_j) for j <= i. It is not computed for j > i, where it could overflow.
  void ratios(uint32_t i, float* ratio) const {
    for (uint32_t j = 0; j < kMixerChunk; ++j) ratio[j] = j <= i ? static_cast<float>(sums[i] - sums[j]) : 0;
    exponentials(ratio);
  }
  static void exponentials(float* x) {
    for (uint32_t i = 0; i < kMixerChunk; i += kLanes) store(x + i, exp(load(x + i)));
  }
};

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
  if (!d.before) take_state(d.before, d.m, size_t(d.width) * d.width);
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
template <bool adds, int vecs, int rows>
inline void tile(const Product& p, uint32_t row, uint32_t col) {
  Vec sums[rows][vecs] = {};
  const float* a = p.a + row * p.a_row;
  const float* b = p.b + col;
  for (uint32_t k = 0; k < p.depth; ++k, a += p.a_depth, b += p.b_stride) {
    Vec of[vecs];
    for (int v = 0; v < vecs; ++v) of[v] = load(b + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const float element = a[r * p.a_row];
      for (int v = 0; v < vecs; ++v) sums[r][v] += element * of[v];
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vecs; ++v) {
      float* to = p.c + (row + r) * p.c_stride + col + v * kLanes;
      store(to, adds ? p.keep * load(to) + sums[r][v] : sums[r][v]);
    }
}
template <bool adds, int vecs, int rows = kTileRows>
inline void tile_of(uint32_t wanted, const Product& p, uint32_t row, uint32_t col) {
  if constexpr (rows > 0) {
    if (wanted >= rows) return tile<adds, vecs, rows>(p, row, col);
    tile_of<adds, vecs, rows - 1>(wanted, p, row, col);
  }
}
// `cols` is a multiple of 16.
template <bool adds>
void multiply(uint32_t rows, uint32_t cols, const Product& p) {
  uint32_t col = 0;
  for (; col + kTileVecs * kLanes <= cols; col += kTileVecs * kLanes)
    for (uint32_t row = 0; row < rows; row += kTileRows) tile_of<adds, kTileVecs>(rows - row, p, row, col);
  for (; col < cols; col += kLanes)
    for (uint32_t row = 0; row < rows; row += kTileRows) tile_of<adds, 1>(rows - row, p, row, col);
}

// The rows of a chunk see each other through products of their keys, and the state before the chunk through
// one product with it. With G_i the sum of gamma up to row i and R_ij = e^(G_i - G_j) for j <= i:
//   N_i = beta_i (v_i - e^G_i M^T k_i) - sum over j < i of beta_i R_ij (k_i k_j) N_j
//   y_i = e^G_i M^T q_i + sum over j <= i of R_ij (q_i k_j) N_j
//   M = e^G_last M + sum over j of e^(G_last - G_j) k_j N_j^T
void delta_chunk(const DeltaRows& d) {
  constexpr uint32_t kMost = kMixerChunk;
  const uint32_t n = d.rows, width = d.width;
  take_state(d.before, d.m, size_t(width) * width);
  float* const units = d.scratch;               // [2 n][width]: keys, then queries
  float* const of_m = units + 2 * n * width;    // [2 n][width]: M^T of them
  float* const news = of_m + 2 * n * width;     // [n][width]: N
  float* const turned = news + n * width;       // [width][kMost]: keys, transposed
  float* const pairs = turned + width * kMost;  // [2 n][kMost]: products of keys and queries with keys
  const Decays decays(d.gamma, n);

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
    decays.ratios(i, ratio);
    float* const keys = pairs + i * kMost;
    float* const queries = pairs + (n + i) * kMost;
    for (uint32_t j = 0; j <= i; ++j) {
      keys[j] *= d.beta[i] * ratio[j];
      queries[j] *= ratio[j];
    }
    const float decay = decays.until[i], beta = d.beta[i];
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
      store(units + i * width + c, decays.after[i] * load(units + i * width + c));
  multiply<true>(width, width, {units, 1, width, news, width, n, d.m, width, decays.last()});
}

// ---- Mamba-2 ----
// Widths and states are multiples of 16, and so of kLanes.

// One row, for the columns of `vecs` vectors: S = e^decay S + B (delta x)^T;  y = S^T C + d x.
template <int vecs>
inline void ssm_columns(const SsmRows& r, uint32_t row, uint32_t col, float decay, const float* before) {
  const float* const x = r.x + row * r.stride + col;
  const float *b = r.b + row * r.stride, *c = r.c + row * r.stride;
  Vec added[vecs], y[vecs];
  for (int v = 0; v < vecs; ++v) {
    added[v] = r.delta[row] * load(x + v * kLanes);
    y[v] = r.d * load(x + v * kLanes);
  }
  for (uint32_t i = 0; i < r.state; ++i) {
    const float bi = b[i], ci = c[i];
#pragma GCC unroll 8
    for (int v = 0; v < vecs; ++v) {
      const size_t at = size_t(i) * r.width + col + v * kLanes;
      const Vec of = decay * load(before + at) + bi * added[v];
      store(r.s + at, of);
      y[v] += ci * of;
    }
  }
  for (int v = 0; v < vecs; ++v) store(r.y + row * r.y_stride + col + v * kLanes, y[v]);
}

void ssm_steps(const SsmRows& r) {
  if (!r.before) take_state(r.before, r.s, size_t(r.state) * r.width);
  const float* before = r.before ? r.before : r.s;
  for (uint32_t row = 0; row < r.rows; ++row, before = r.s) {
    const float decay = exp(broadcast(r.decay[row]))[0];
    uint32_t col = 0;
    for (; col + kStepVecs * kLanes <= r.width; col += kStepVecs * kLanes)
      ssm_columns<kStepVecs>(r, row, col, decay, before);
    for (; col < r.width; col += kLanes) ssm_columns<1>(r, row, col, decay, before);
  }
}

// [rows][kMixerChunk]: products of C of a row with B of each row
void ssm_products(const SsmRows& r) {
  float* const pairs = r.scratch;
  float* const turned = pairs + 2 * kMixerChunk * kMixerChunk;  // [state][kMixerChunk]: B, transposed
  for (uint32_t j = 0; j < kMixerChunk; ++j)
    for (uint32_t i = 0; i < r.state; ++i)
      turned[i * kMixerChunk + j] = j < r.rows ? r.b[j * r.stride + i] : 0;
  multiply<false>(r.rows, kMixerChunk,
                  {r.c, r.stride, 1, turned, kMixerChunk, r.state, pairs, kMixerChunk, 0});
}

// As the gated delta rule without its corrections of values. With G_i the sum of the decays' exponents up to
// row i and R_ij = e^(G_i - G_j) for j <= i:
//   y_i = e^G_i S^T C_i + sum over j <= i of R_ij (C_i B_j) delta_j x_j + d x_i
//   S = e^G_last S + sum over j of e^(G_last - G_j) B_j (delta_j x_j)^T
void ssm_chunk(const SsmRows& r) {
  constexpr uint32_t kMost = kMixerChunk;
  const uint32_t n = r.rows, width = r.width;
  take_state(r.before, r.s, size_t(r.state) * width);
  const float* const pairs = r.scratch;
  float* const weights = r.scratch + kMost * kMost;  // [kMost]: what row i takes of each row
  float* const added = weights + kMost * kMost;      // [n][width]: what rows add to the state
  const Decays decays(r.decay, n);
  multiply<false>(n, width, {r.c, r.stride, 1, r.s, width, r.state, r.y, r.y_stride, 0});
  for (uint32_t i = 0; i < n; ++i) {
    decays.ratios(i, weights);
    for (uint32_t j = 0; j <= i; ++j) weights[j] *= pairs[i * kMost + j] * r.delta[j];
    const float* const x = r.x + i * r.stride;
    float* const y = r.y + i * r.y_stride;
    const float after = decays.after[i] * r.delta[i];
    uint32_t col = 0;
    const auto columns = [&]<int vecs>(std::integral_constant<int, vecs>) {
      Vec sums[vecs];
      for (int v = 0; v < vecs; ++v)
        sums[v] = decays.until[i] * load(y + col + v * kLanes) + r.d * load(x + col + v * kLanes);
      for (uint32_t j = 0; j <= i; ++j)
        for (int v = 0; v < vecs; ++v) sums[v] += weights[j] * load(r.x + j * r.stride + col + v * kLanes);
      for (int v = 0; v < vecs; ++v) {
        store(y + col + v * kLanes, sums[v]);
        store(added + i * width + col + v * kLanes, after * load(x + col + v * kLanes));
      }
      col += vecs * kLanes;
    };
    while (col + 4 * kLanes <= width) columns(std::integral_constant<int, 4>());
    while (col < width) columns(std::integral_constant<int, 1>());
  }
  multiply<true>(r.state, width, {r.b, 1, r.stride, added, width, n, r.s, width, decays.last()});
}

}  // namespace

extern const MixerKernels THIMBLE_MIXER_KERNELS;
const MixerKernels THIMBLE_MIXER_KERNELS = {
    .convolve = convolve,
    .delta_steps = delta_steps,
    .delta_chunk = delta_chunk,
    .ssm_steps = ssm_steps,
    .ssm_products = ssm_products,
    .ssm_chunk = ssm_chunk,
    .gated_norm = gated_norm,
    .gate = gate,
};

}  // namespace thimble::cpu
