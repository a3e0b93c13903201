// delta_net in chunks, by two kernels. What the rows of a chunk are to each other does not depend on the
// state, so the first kernel computes it for all chunks at once. The second one goes from chunk to chunk, a
// warp with 16 columns of a matrix in registers.
//
// With G_i the sum of gamma up to row i of the chunk, R_ij = e^(G_i - G_j) for j <= i, and M the matrix
// before the chunk:
//   A_ij = beta_i R_ij (k_i k_j) for j < i;  P = (I + A)^-1 diag(beta);  S_ij = R_ij (q_i k_j) / sqrt(width)
//   N = P (V - diag(e^G) K M);  Y = diag(e^G) Q M / sqrt(width) + S N
//   M = e^G_last M + (diag(e^(G_last - G)) K)^T N
// A and its inverse are exact to f32. The operands of the products are rounded to the 11 bits of f16. Those
// of M, V and N are first multiplied by powers of two, one for each column, so that f16 can hold them.
#include <algorithm>
#include <iterator>

#include "backends/cuda/mixers/delta_net.cuh"
#include "backends/cuda/mma.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kChunk = kDeltaChunk, kTiles = kChunk / 8;  // tiles of 8 rows
constexpr uint32_t kMostChunks = 32;                           // of a pass over the scratch

// The scratch of a pass: f16 keys and queries of unit length, P and S, and e^G and e^(G_last - G).
struct Scratch {
  __half* vectors;  // [chunk][key head][2][kChunk][width]
  __half* pairs;    // [chunk][value head][2][kChunk][kChunk]
  float* decays;    // [chunk][value head][2][kChunk]
};

// Where the 8 elements of a unit of 16 bytes are in a row of kWidth f16, so that 8 rows of a tile are in
// different banks.
template <uint32_t kWidth>
__device__ uint32_t unit_at(uint32_t row, uint32_t unit) {
  const uint32_t shift = kWidth % 64 == 0 ? row % 8 : kWidth == 32 ? row / 2 % 4 : row % 4;
  return row * kWidth + (unit ^ shift) * 8;
}

__device__ uint32_t to_tf32(float x) {
  uint32_t bits;
  round_tf32(bits, x);
  return bits;
}

// ---- what does not depend on the state ----

constexpr uint32_t kPairThreads = 256;
constexpr uint32_t kPairStride = kChunk + 4;  // floats between rows of A

template <uint32_t kWidth>
struct PairShared {
  static constexpr uint32_t kKeyStride = kWidth + 8;
  static constexpr uint32_t kFloats =
      kWidth + 8 > 2 * kPairStride ? kChunk* kKeyStride : 2 * kChunk* kPairStride;
  float floats[kFloats];  // keys [kChunk][kKeyStride], and later A and its inverse, [kChunk][kPairStride]
  __half vectors[2][kChunk * kWidth];  // keys and queries, as in the scratch
  float high[kChunk], low[kChunk];     // G is their sum
  float beta[kChunk];
};

// From the inverses of diagonal blocks of `size` rows, makes those of 2 `size` rows: the new corner is
// -T22 A21 T11. A21 T11 is kept where the inverse has zeros.
template <uint32_t size>
__device__ void merge_blocks(const float* a, float* t) {
  constexpr uint32_t kElements = kChunk / (2 * size) * size * size;
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < kElements; e += kPairThreads) {
    const uint32_t first = e / (size * size) * 2 * size, i = e / size % size, j = e % size;
    float sum = 0;
#pragma unroll
    for (uint32_t k = 0; k < size; ++k) {
      const float of = t[(first + k) * kPairStride + first + j];
      sum += a[(first + size + i) * kPairStride + first + k] * (k >= j ? of : 0.0f);
    }
    t[(first + i) * kPairStride + first + size + j] = sum;
  }
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < kElements; e += kPairThreads) {
    const uint32_t first = e / (size * size) * 2 * size, i = e / size % size, j = e % size;
    float sum = 0;
#pragma unroll
    for (uint32_t k = 0; k < size; ++k) {
      const float of = t[(first + size + i) * kPairStride + first + size + k];
      sum += (k <= i ? of : 0.0f) * t[(first + k) * kPairStride + first + size + j];
    }
    t[(first + size + i) * kPairStride + first + j] = -sum;
  }
}

template <uint32_t kWidth>
__global__ void __launch_bounds__(kPairThreads)
    delta_pairs_kernel(const StepParams* step, DeltaNetParams p, DeltaOperands o, uint32_t first_chunk,
                       Scratch scratch) {
  extern __shared__ uint4 shared[];
  PairShared<kWidth>& m = *reinterpret_cast<PairShared<kWidth>*>(shared);
  constexpr uint32_t kKeyStride = PairShared<kWidth>::kKeyStride, kParts = kWidth / kWarp;
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t head = blockIdx.y, key_head = key_head_of(p, head);
  const uint64_t of_head = uint64_t(blockIdx.x) * p.value_heads + head;
  const float a_factor = o.a[head], dt = o.dt[head];
  const StepParams s = begin_kernel(step);
  const uint32_t chunk = first_chunk + blockIdx.x;
  if (chunk >= chunks_of(s.n_rows)) return;
  const uint32_t first_row = chunk * kChunk, rows = min(s.n_rows - first_row, kChunk);

  // Rows beyond the last are zeros.
  constexpr uint32_t kWarpRows = kChunk * kWarp / kPairThreads;
  const float query_scale = 1.0f / sqrtf(static_cast<float>(kWidth));
#pragma unroll 4
  for (uint32_t i = 0; i < kWarpRows; ++i) {
    const uint32_t row = warp * kWarpRows + i;
    const bool valid = row < rows;
    const float* qkv = o.qkv + uint64_t(first_row + row) * p.qkv_stride + key_head * kWidth + lane;
    float k[kParts], q[kParts], kk = 0, qq = 0;
#pragma unroll
    for (uint32_t j = 0; j < kParts; ++j) {
      k[j] = valid ? qkv[p.k_column + j * kWarp] : 0.0f;
      q[j] = valid ? qkv[p.q_column + j * kWarp] : 0.0f;
      kk += k[j] * k[j], qq += q[j] * q[j];
    }
    const float k_scale = valid ? 1.0f / sqrtf(warp_sum(kk) + p.eps) : 0.0f;
    const float q_scale = valid ? query_scale / sqrtf(warp_sum(qq) + p.eps) : 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < kParts; ++j) {
      const uint32_t c = j * kWarp + lane, at = unit_at<kWidth>(row, c / 8) + c % 8;
      m.floats[row * kKeyStride + c] = k_scale * k[j];
      m.vectors[0][at] = __float2half_rn(k_scale * k[j]);
      m.vectors[1][at] = __float2half_rn(q_scale * q[j]);
    }
  }
  if (warp == 0) {
    // A lane takes two rows. Sums of f32 would lose bits of small gammas after large ones.
    float gamma[2];
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t row = 2 * lane + e;
      const float* gates = o.gates + uint64_t(first_row + row) * p.gates_stride + head;
      gamma[e] = row < rows ? log_decay(a_factor, gates[p.alpha_column], dt) : 0.0f;
      m.beta[row] = row < rows ? sigmoid(gates[p.beta_column]) : 0.0f;
    }
    double sum = static_cast<double>(gamma[0]) + gamma[1];
#pragma unroll
    for (uint32_t offset = 1; offset < kWarp; offset *= 2) {
      const double of = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += of;
    }
    const double last = __shfl_sync(~0u, sum, kWarp - 1);
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t row = 2 * lane + e;
      const double g = e ? sum : sum - gamma[1];
      m.high[row] = static_cast<float>(g);
      m.low[row] = static_cast<float>(g - m.high[row]);
      float* decays = scratch.decays + of_head * 2 * kChunk;
      decays[row] = expf(static_cast<float>(g));
      decays[kChunk + row] = expf(static_cast<float>(last - g));
    }
  }
  __syncthreads();
  // The first value head of a key head leaves its vectors to all.
  if (leads(p, head)) {
    const uint4* from = reinterpret_cast<const uint4*>(m.vectors);
    uint4* to = reinterpret_cast<uint4*>(scratch.vectors + (uint64_t(blockIdx.x) * p.key_heads + key_head) *
                                                               2 * kChunk * kWidth);
    for (uint32_t i = threadIdx.x; i < sizeof m.vectors / sizeof(uint4); i += kPairThreads) to[i] = from[i];
  }

  if (grows(a_factor)) return;

  // A warp takes 16 rows of the products of keys and queries with keys, and 4 tiles of 8 columns.
  const uint32_t g = lane / 4, t = lane % 4;
  const uint32_t row0 = warp / 2 * 16, tile0 = warp % 2 * 4, tiles = row0 / 8 + 2;  // later tiles are zeros
  float kk[4][4] = {}, qk[4][4] = {};
  // Which columns an element of a fragment is of is free, as long as it is the same in both operands: a
  // thread takes pairs.
  for (uint32_t d = 0; d < kWidth; d += 8) {
    uint32_t high[4], low[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float x = m.floats[(row0 + g + i % 2 * 8) * kKeyStride + d + 2 * t + i / 2];
      high[i] = to_tf32(x);
      low[i] = to_tf32(x - __uint_as_float(high[i]));
    }
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n) {
      if (tile0 + n >= tiles) break;
      const float* key = m.floats + ((tile0 + n) * 8 + g) * kKeyStride + d + 2 * t;
      const uint32_t b0 = to_tf32(key[0]), b1 = to_tf32(key[1]);
      multiply_tf32(kk[n], low, b0, b1);
      multiply_tf32(kk[n], high, to_tf32(key[0] - __uint_as_float(b0)),
                    to_tf32(key[1] - __uint_as_float(b1)));
      multiply_tf32(kk[n], high, b0, b1);
    }
  }
  for (uint32_t d = 0; d < kWidth / 8; d += 2) {
    uint32_t a[4];
    load_matrices(a, m.vectors[1] + unit_at<kWidth>(row0 + lane % 16, d + lane / 16));
#pragma unroll
    for (uint32_t n = 0; n < 4; n += 2) {
      if (tile0 + n >= tiles) break;
      uint32_t b[4];
      load_matrices(b,
                    m.vectors[0] + unit_at<kWidth>((tile0 + n + lane / 16) * 8 + lane % 8, d + lane / 8 % 2));
      multiply_f16(qk[n], a, b[0], b[1]);
      multiply_f16(qk[n + 1], a, b[2], b[3]);
    }
  }
  __syncthreads();
  float* const matrix = m.floats;
  float* const inverse = m.floats + kChunk * kPairStride;
  __half* const pairs = scratch.pairs + of_head * 2 * kChunk * kChunk;
#pragma unroll
  for (uint32_t n = 0; n < 4; ++n) {
    if (tile0 + n >= tiles) break;
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      const uint32_t i = row0 + g + r * 8;
      float seen[2];
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t j = (tile0 + n) * 8 + 2 * t + e;
        const float ratio = j <= i ? expf((m.high[i] - m.high[j]) + (m.low[i] - m.low[j])) : 0.0f;
        seen[e] = j <= i ? ratio * qk[n][2 * r + e] : 0.0f;
        matrix[i * kPairStride + j] = j < i ? m.beta[i] * ratio * kk[n][2 * r + e] : 0.0f;
      }
      *reinterpret_cast<__half2*>(pairs + kChunk * kChunk + unit_at<kChunk>(i, tile0 + n) + 2 * t) =
          __floats2half2_rn(seen[0], seen[1]);
    }
  }
  __syncthreads();
  // The inverses of diagonal blocks of 16 rows; a thread takes a column.
  if (threadIdx.x < kChunk) {
    const uint32_t first = threadIdx.x / 16 * 16, column = threadIdx.x % 16;
    float x[16];
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (uint32_t j = 0; j < i; ++j) x[i] -= matrix[(first + i) * kPairStride + first + j] * x[j];
      inverse[(first + i) * kPairStride + first + column] = x[i];
    }
  }
  merge_blocks<16>(matrix, inverse);
  merge_blocks<32>(matrix, inverse);
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < kChunk * kTiles; e += kPairThreads) {
    const uint32_t i = e / kTiles, tile = e % kTiles;
    if (tile > i / 16 * 2 + 1) continue;  // products take pairs of tiles
    uint4 packed;
    __half2* const halves = reinterpret_cast<__half2*>(&packed);
#pragma unroll
    for (uint32_t h = 0; h < 4; ++h) {
      const uint32_t j = tile * 8 + 2 * h;
      const float* of = inverse + i * kPairStride + j;
      halves[h] =
          __floats2half2_rn(j <= i ? of[0] * m.beta[j] : 0.0f, j + 1 <= i ? of[1] * m.beta[j + 1] : 0.0f);
    }
    *reinterpret_cast<uint4*>(pairs + unit_at<kChunk>(i, tile)) = packed;
  }
}

// ---- from chunk to chunk ----

constexpr uint32_t kChainWarps = 2, kWarpCols = 16, kChainCols = kChainWarps * kWarpCols;
constexpr uint32_t kChainThreads = kChainWarps * kWarp;

// What a chunk brings, as in the scratch. Two are in shared memory: one is read while the next one arrives.
template <uint32_t kWidth>
struct Stage {
  __half vectors[2][kChunk * kWidth];
  __half pairs[2][kChunk * kChunk];
  float decays[2][kChunk];
};

template <uint32_t kBytes>
__device__ void copy_in(void* to, const void* from) {
  static_assert(kBytes % 16 == 0);
  for (uint32_t i = threadIdx.x; i < kBytes / 16; i += kChainThreads)
    copy_async<16>(static_cast<uint4*>(to) + i, static_cast<const uint4*>(from) + i);
}

// Products are transposed: a warp has 16 columns of each matrix as the rows of fragments, and rows of a chunk
// or of M as their columns. In a fragment of a result, a thread has the elements (g, 2t), (g, 2t + 1),
// (g + 8, 2t) and (g + 8, 2t + 1). Two of them, rounded to f16, are its part of the operand of the next
// product, so nothing is exchanged between threads.
using Fragment = float[4];

// Powers of two for columns g and g + 8, and what undoes them.
struct Scales {
  float by[2], back[2];
};
// Scales with which the largest element of a column is between 2^13 and 2^14. Infinity and NaN remain.
template <uint32_t kCount>
__device__ Scales scales_of(const Fragment (&of)[kCount]) {
  Scales s;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    uint32_t largest = 0;  // bits of absolute values order like numbers
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) largest = max(largest, __float_as_uint(fabsf(of[i][2 * half + e])));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const uint32_t exponent = max(largest >> 23, 14u);
    s.by[half] = __uint_as_float((267 - exponent) << 23);
    s.back[half] = __uint_as_float((exponent - 13) << 23);
  }
  return s;
}

__device__ uint32_t to_halves(float a, float b) {
  const __half2 halves = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(halves);
}
// The operand of a product that two tiles next to each other are.
__device__ void pack(uint32_t (&to)[4], const Fragment& a, const Fragment& b, const float (&by)[2]) {
  to[0] = to_halves(by[0] * a[0], by[0] * a[1]);
  to[1] = to_halves(by[1] * a[2], by[1] * a[3]);
  to[2] = to_halves(by[0] * b[0], by[0] * b[1]);
  to[3] = to_halves(by[1] * b[2], by[1] * b[3]);
}
// c[i] += sum over tiles j of a[j] b[i][j], where b has f16 rows of kChunk, with zeros for j > i.
__device__ void multiply_lower(Fragment (&c)[kTiles], const uint32_t (&a)[kTiles / 2][4], const __half* b,
                               uint32_t lane) {
#pragma unroll
  for (uint32_t j = 0; j < kTiles; j += 2)
#pragma unroll
    for (uint32_t i = j; i < kTiles; i += 2) {
      uint32_t of_b[4];
      load_matrices(of_b, b + unit_at<kChunk>((i + lane / 16) * 8 + lane % 8, j + lane / 8 % 2));
      multiply_f16(c[i], a[j / 2], of_b[0], of_b[1]);
      multiply_f16(c[i + 1], a[j / 2], of_b[2], of_b[3]);
    }
}

template <uint32_t kWidth>
__global__ void __launch_bounds__(kChainThreads)
    delta_chain_kernel(const StepParams* step, DeltaNetParams p, DeltaOperands o, uint32_t first_chunk,
                       uint32_t most_chunks, Scratch scratch) {
  extern __shared__ uint4 shared[];
  Stage<kWidth>* const stages = reinterpret_cast<Stage<kWidth>*>(shared);
  constexpr uint32_t kKeyTiles = kWidth / 8;
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const uint32_t head = blockIdx.y, key_head = key_head_of(p, head);
  const uint32_t col = blockIdx.x * kChainCols + warp * kWarpCols + g;
  release_successor();
  const StepParams s = *step;
  const uint32_t end = grows(o.a[head]) ? 0 : min(chunks_of(s.n_rows), first_chunk + most_chunks);

  // Element e of tile i is of row row_of(i, e), and of column col + e / 2 * 8.
  const auto row_of = [&](uint32_t i, uint32_t e) { return i * 8 + 2 * t + e % 2; };
  const uint64_t of_head = uint64_t(head) * kWidth * kWidth + col;
  const float* before = state_before(s, o, first_chunk > 0);
  if (before) before += of_head;
  float* after = o.slots + s.state_to * o.slot_stride + of_head;
  Fragment m[kKeyTiles] = {};
  const auto read_state = [&] {
#pragma unroll
    for (uint32_t i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) m[i][e] = __ldcg(before + row_of(i, e) * kWidth + e / 2 * 8);
  };
  // No kernel of this program writes the slot that is read, unless it is the slot that is written.
  const bool reads = before && first_chunk < end, early = first_chunk == 0 && s.state_from != s.state_to;
  if (reads && early) read_state();
  await_predecessor();
  if (first_chunk >= end) return;
  if (reads && !early) read_state();

  const auto fetch = [&](uint32_t chunk) {
    const uint32_t i = chunk - first_chunk;
    Stage<kWidth>& stage = stages[i % 2];
    copy_in<sizeof stage.vectors>(
        stage.vectors, scratch.vectors + (uint64_t(i) * p.key_heads + key_head) * 2 * kChunk * kWidth);
    const uint64_t at = uint64_t(i) * p.value_heads + head;
    copy_in<sizeof stage.pairs>(stage.pairs, scratch.pairs + at * 2 * kChunk * kChunk);
    copy_in<sizeof stage.decays>(stage.decays, scratch.decays + at * 2 * kChunk);
  };
  fetch(first_chunk);
  commit_copies();
  for (uint32_t chunk = first_chunk; chunk < end; ++chunk) {
    if (chunk + 1 < end) fetch(chunk + 1);
    commit_copies();
    const uint32_t first_row = chunk * kChunk;
    Fragment values[kTiles];
#pragma unroll
    for (uint32_t i = 0; i < kTiles; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        const uint32_t row = first_row + row_of(i, e);
        values[i][e] =
            row < s.n_rows
                ? o.qkv[uint64_t(row) * p.qkv_stride + p.v_column + head * kWidth + col + e / 2 * 8]
                : 0.0f;
      }
    wait_copies<1>();
    __syncthreads();
    const Stage<kWidth>& stage = stages[(chunk - first_chunk) % 2];

    const Scales of_m = scales_of(m);
    Fragment of_keys[kTiles] = {}, of_queries[kTiles] = {};
#pragma unroll
    for (uint32_t d = 0; d < kKeyTiles; d += 2) {
      uint32_t a[4];
      pack(a, m[d], m[d + 1], of_m.by);
#pragma unroll
      for (uint32_t i = 0; i < kTiles; i += 2) {
        uint32_t k[4], q[4];
        const uint32_t at = unit_at<kWidth>((i + lane / 16) * 8 + lane % 8, d + lane / 8 % 2);
        load_matrices(k, stage.vectors[0] + at);
        load_matrices(q, stage.vectors[1] + at);
        multiply_f16(of_keys[i], a, k[0], k[1]);
        multiply_f16(of_keys[i + 1], a, k[2], k[3]);
        multiply_f16(of_queries[i], a, q[0], q[1]);
        multiply_f16(of_queries[i + 1], a, q[2], q[3]);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        const float decay = stage.decays[0][row_of(i, e)] * of_m.back[e / 2];
        values[i][e] -= decay * of_keys[i][e];
        of_queries[i][e] *= decay;
      }
    }
    uint32_t a[kTiles / 2][4];
    const auto pack_all = [&](const Fragment(&of)[kTiles], const Scales& s) {
#pragma unroll
      for (uint32_t i = 0; i < kTiles; i += 2) pack(a[i / 2], of[i], of[i + 1], s.by);
    };
    const Scales of_values = scales_of(values);
    pack_all(values, of_values);
    Fragment news[kTiles] = {}, seen[kTiles] = {};
    multiply_lower(news, a, stage.pairs[0], lane);
#pragma unroll
    for (uint32_t i = 0; i < kTiles; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) news[i][e] *= of_values.back[e / 2];
    const Scales of_news = scales_of(news);
    pack_all(news, of_news);
    multiply_lower(seen, a, stage.pairs[1], lane);
#pragma unroll
    for (uint32_t i = 0; i < kTiles; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        const uint32_t row = first_row + row_of(i, e);
        if (row < s.n_rows)
          o.y[uint64_t(row) * p.y_stride + head * kWidth + col + e / 2 * 8] =
              of_queries[i][e] + of_news.back[e / 2] * seen[i][e];
      }

#pragma unroll
    for (uint32_t i = 0; i < kTiles; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) news[i][e] *= stage.decays[1][row_of(i, e)];
    const Scales of_left = scales_of(news);
    pack_all(news, of_left);
    const float decay = stage.decays[0][kChunk - 1];
#pragma unroll
    for (uint32_t d = 0; d < kKeyTiles; d += 2) {
      Fragment sums[2] = {};
#pragma unroll
      for (uint32_t j = 0; j < kTiles; j += 2) {
        uint32_t k[4];
        load_matrices_transposed(
            k, stage.vectors[0] + unit_at<kWidth>((j + lane / 8 % 2) * 8 + lane % 8, d + lane / 16));
        multiply_f16(sums[0], a[j / 2], k[0], k[1]);
        multiply_f16(sums[1], a[j / 2], k[2], k[3]);
      }
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) m[d + i][e] = decay * m[d + i][e] + of_left.back[e / 2] * sums[i][e];
    }
    __syncthreads();
  }
#pragma unroll
  for (uint32_t i = 0; i < kKeyTiles; ++i)
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) after[row_of(i, e) * kWidth + e / 2 * 8] = m[i][e];
}

template <uint32_t kWidth>
void chunks_of_width(const Launch& l, const DeltaNetParams& p, const DeltaOperands& o) {
  const uint32_t chunks = static_cast<uint32_t>(ceil_div(l.max_rows, kChunk));
  const uint32_t most = static_cast<uint32_t>(std::min<uint64_t>(
      {chunks, kMostChunks, l.scratch_bytes / delta_chunk_bytes(p.key_heads, p.value_heads, kWidth)}));
  Scratch scratch;
  scratch.vectors = reinterpret_cast<__half*>(l.scratch);
  scratch.pairs = scratch.vectors + uint64_t(most) * p.key_heads * 2 * kChunk * kWidth;
  scratch.decays =
      reinterpret_cast<float*>(scratch.pairs + uint64_t(most) * p.value_heads * 2 * kChunk * kChunk);
  for (uint32_t first = 0; first < chunks; first += most) {
    launch(l, delta_pairs_kernel<kWidth>, dim3(std::min(most, chunks - first), p.value_heads), kPairThreads,
           sizeof(PairShared<kWidth>), l.step, p, o, first, scratch);
    launch(l, delta_chain_kernel<kWidth>, dim3(kWidth / kChainCols, p.value_heads), kChainThreads,
           2 * sizeof(Stage<kWidth>), l.step, p, o, first, most, scratch);
  }
}

}  // namespace

uint64_t delta_chunk_bytes(uint32_t key_heads, uint32_t value_heads, uint32_t width) {
  return uint64_t(key_heads) * 2 * kChunk * width * sizeof(__half) +
         uint64_t(value_heads) * 2 * kChunk * (kChunk * sizeof(__half) + sizeof(float));
}

uint64_t delta_net_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  const uint64_t chunks = std::min<uint64_t>(ceil_div(s.chunk, kChunk), kMostChunks);
  return s.chunk < kLeastChunk ? 0 : chunks * delta_chunk_bytes(m.delta_keys, m.delta_values, m.delta_width);
}

void delta_chunks(const Launch& l, const DeltaNetParams& p, const DeltaOperands& o) {
  constexpr decltype(&chunks_of_width<32>) kOfWidth[] = {chunks_of_width<32>, chunks_of_width<64>,
                                                         chunks_of_width<96>, chunks_of_width<128>};
  static_assert(std::size(kOfWidth) * kWarp == kMostDeltaWidth);
  kOfWidth[p.width / kWarp - 1](l, p, o);
}

}  // namespace thimble::cuda
