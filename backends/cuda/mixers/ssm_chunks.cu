// ssm in chunks, by three kernels. The first one computes what rows of a chunk are to each other. The second
// one goes from chunk to chunk and leaves the state before each. With these, the third one computes all
// chunks of y at once.
//
// With G_i the sum of gamma = delta a up to row i of the chunk, R_ij = e^(G_i - G_j) for j <= i, and S the
// state before the chunk:
//   Y = diag(e^G) C S + (R * C B^T) diag(delta) X + d X
//   S = e^G_last S + B^T diag(e^(G_last - G) delta) X
// Operands of products are the sum of two tf32, which have 22 bits together, so products are as exact as
// those of f32. Rows after the last of a step are zeros with gamma = 0: they leave the state as it is.
#include <algorithm>

#include "backends/cuda/mixers/ssm.cuh"
#include "backends/cuda/mma.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kChunk = 64;            // rows
constexpr uint64_t kPassBytes = 32 << 20;  // of scratch: the second-level cache of a Hopper card keeps it

// What the first kernel computes of the rows of a chunk for a head.
struct Decays {
  float until[kChunk];  // e^G
  float after[kChunk];  // e^(G_last - G) delta
  float delta[kChunk];
  float high[kChunk], low[kChunk];  // G is their sum
};

// Of a pass.
struct Scratch {
  float* states;    // [chunk][head][state][width]: before the chunk
  float* products;  // [chunk][group][kChunk][kChunk]: c_i b_j; tiles of 16 rows up to that of the diagonal
  Decays* decays;   // [chunk][head]
};

__device__ uint32_t chunks_of(const StepParams& s) { return (s.n_rows + kChunk - 1) / kChunk; }

// Numbers as sums of two tf32.
template <uint32_t kCount>
__device__ void split(uint32_t (&high)[kCount], uint32_t (&low)[kCount], const float (&x)[kCount]) {
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    round_tf32(high[i], x[i]);
    round_tf32(low[i], x[i] - __uint_as_float(high[i]));
  }
}

// Which of the 8 numbers of a sum an element of a fragment is of is free, as long as it is the same in both
// operands: thread t of a row has numbers 2t and 2t + 1. So a fragment of A has the elements (g, 2t), (g + 8,
// 2t), (g, 2t + 1) and (g + 8, 2t + 1), that of B has (2t, g) and (2t + 1, g), and that of the result has (g,
// 2t), (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1), for lane 4g + t.
struct FragmentA {
  uint32_t high[4], low[4];
  __device__ explicit FragmentA(const float (&x)[4]) { split(high, low, x); }
};
struct FragmentB {
  uint32_t high[2], low[2];
  __device__ FragmentB(float x0, float x1) {
    const float x[2] = {x0, x1};
    split(high, low, x);
  }
};
__device__ void multiply(float (&c)[4], const FragmentA& a, const FragmentB& b) {
  multiply_tf32(c, a.low, b.high[0], b.high[1]);
  multiply_tf32(c, a.high, b.low[0], b.low[1]);
  multiply_tf32(c, a.high, b.high[0], b.high[1]);
}

// Rows of a tile in shared memory are kTileStride apart, so that the elements of a fragment are in different
// banks.
constexpr uint32_t kTileCols = 64, kTileStride = kTileCols + 4;
constexpr uint32_t kTile = kChunk * kTileStride;  // floats

// Copies a tile of up to kTileCols columns, a multiple of 16. Rows and columns after the last become zeros.
// `in_quads`: each row begins at 16 bytes.
template <uint32_t kThreads>
__device__ void copy_tile(float* to, const float* from, uint32_t stride, uint32_t tile_rows, uint32_t rows,
                          uint32_t cols, bool in_quads) {
  const auto copy = [&]<uint32_t kFloats>(std::integral_constant<uint32_t, kFloats>) {
    constexpr uint32_t kUnits = kTileCols / kFloats;
    for (uint32_t i = threadIdx.x; i < tile_rows * kUnits; i += kThreads) {
      const uint32_t row = i / kUnits, col = i % kUnits * kFloats;
      const bool valid = row < rows && col < cols;
      copy_async<kFloats * sizeof(float)>(to + row * kTileStride + col,
                                          from + (valid ? uint64_t(row) * stride + col : 0), valid);
    }
  };
  if (in_quads)
    copy(std::integral_constant<uint32_t, 4>());
  else
    copy(std::integral_constant<uint32_t, 1>());
}

// ---- rows of a chunk ----

constexpr uint32_t kTileRows = 16, kRowTiles = kChunk / kTileRows;  // of a fragment of A
constexpr uint32_t kPairThreads = kRowTiles * kWarp;

// A warp takes two rows with each lane.
__device__ void find_decays(const SsmParams& p, const SsmOperands& o, uint32_t head, uint32_t first_row,
                            uint32_t rows, uint32_t lane, Decays& to) {
  const float a = o.a[head], dt_bias = o.dt_bias[head];
  float delta[2] = {}, gamma[2] = {};
#pragma unroll
  for (uint32_t e = 0; e < 2; ++e) {
    const uint32_t row = 2 * lane + e;
    if (row >= rows) continue;
    delta[e] = softplus(o.dt[uint64_t(first_row + row) * p.dt_stride + p.dt_column + head] + dt_bias);
    gamma[e] = delta[e] * a;
  }
  // Sums of f32 would lose bits of small gammas after large ones.
  double sum = static_cast<double>(gamma[0]) + gamma[1];
#pragma unroll
  for (uint32_t offset = 1; offset < kWarp; offset *= 2) {
    const double of = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += of;
  }
  // Not the lane's sum less its last: what is not a number must not reach earlier rows.
  const double before = __shfl_up_sync(~0u, sum, 1), last = __shfl_sync(~0u, sum, kWarp - 1);
#pragma unroll
  for (uint32_t e = 0; e < 2; ++e) {
    const uint32_t row = 2 * lane + e;
    const double g = e ? sum : (lane ? before : 0) + gamma[0];
    to.until[row] = expf(static_cast<float>(g));
    to.after[row] = expf(static_cast<float>(last - g)) * delta[e];
    to.delta[row] = delta[e];
    to.high[row] = static_cast<float>(g);
    to.low[row] = static_cast<float>(g - to.high[row]);
  }
}

// A block takes kTileRows rows of a chunk's products for a group, and a share of the group's heads. A warp
// has as many columns of the products.
__global__ void __launch_bounds__(kPairThreads)
    ssm_pairs_kernel(const StepParams* step, SsmParams p, SsmOperands o, uint32_t first_chunk,
                     Scratch scratch) {
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const StepParams s = begin_kernel(step);
  const uint32_t chunk = blockIdx.x, group = blockIdx.y, tile = blockIdx.z;
  const uint32_t first_row = (first_chunk + chunk) * kChunk;
  if (first_row >= s.n_rows) return;
  const uint32_t rows = min(s.n_rows - first_row, kChunk), of_group = p.heads / p.groups;
  for (uint32_t i = tile * kRowTiles + warp; i < of_group; i += kRowTiles * kRowTiles) {
    const uint32_t head = group * of_group + i;
    find_decays(p, o, head, first_row, rows, lane, scratch.decays[uint64_t(chunk) * p.heads + head]);
  }
  if (warp > tile) return;  // products of later rows

  const float* const of_rows = o.xbc + uint64_t(first_row) * p.xbc_stride + group * p.state + 2 * t;
  const uint32_t row0 = tile * kTileRows + g, col0 = warp * kTileRows + g;
  const auto element = [&](uint32_t row, uint32_t column, uint32_t n) {
    return row < rows ? of_rows[uint64_t(row) * p.xbc_stride + column + n] : 0.0f;
  };
  float sums[2][4] = {};
#pragma unroll 2
  for (uint32_t n = 0; n < p.state; n += 8) {
    float c[4], b[2][2];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) c[i] = element(row0 + i % 2 * 8, p.c_column, n + i / 2);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) b[i / 2][i % 2] = element(col0 + i / 2 * 8, p.b_column, n + i % 2);
    const FragmentA of_c(c);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) multiply(sums[i], of_c, FragmentB(b[i][0], b[i][1]));
  }
  float* const products = scratch.products + (uint64_t(chunk) * p.groups + group) * kChunk * kChunk;
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r)
      *reinterpret_cast<float2*>(products + (row0 + r * 8) * kChunk + warp * kTileRows + i * 8 + 2 * t) =
          make_float2(sums[i][2 * r], sums[i][2 * r + 1]);
}

// ---- from chunk to chunk ----

// A block has kTileCols numbers of kTileCols columns of a head's state, and a warp 16 numbers of 32 columns.
constexpr uint32_t kChainThreads = 8 * kWarp, kChainTiles = 4;

// What a chunk brings. Two are in shared memory: one is read while the next one arrives.
struct Stage {
  float b[kTile], x[kTile];
  float after[kChunk];
};

__global__ void __launch_bounds__(kChainThreads)
    ssm_chain_kernel(const StepParams* step, SsmParams p, SsmOperands o, uint32_t first_chunk,
                     uint32_t most_chunks, bool in_quads, Scratch scratch) {
  extern __shared__ uint4 shared[];
  Stage* const stages = reinterpret_cast<Stage*>(shared);
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const uint32_t head = blockIdx.z, group = head / (p.heads / p.groups);
  const uint32_t first_col = blockIdx.x * kTileCols, first_n = blockIdx.y * kTileCols;
  const uint32_t tile_n = warp / 2 * 16, tile_col = warp % 2 * 32;  // in the block's
  const StepParams s = begin_kernel(step);
  const uint32_t end = min(chunks_of(s), first_chunk + most_chunks);
  if (first_chunk > 0 && first_chunk >= end) return;

  const uint64_t size = uint64_t(p.state) * p.width;
  // Element e of tile i is of number n + e / 2 * 8 and column col + i * 8 + e % 2.
  const uint32_t n = first_n + tile_n + g, col = first_col + tile_col + 2 * t;
  const bool has_numbers = first_n + tile_n < p.state;
  const auto holds = [&](uint32_t i) { return has_numbers && col + i * 8 < p.width; };
  const auto place = [&](uint32_t i, uint32_t e) {
    return uint64_t(n + e / 2 * 8) * p.width + col + i * 8 + e % 2;
  };
  const uint32_t slot = first_chunk > 0 ? s.state_to : s.state_from;
  float m[kChainTiles][4] = {};
  if (slot != kNoState) {
    const float* const before = o.slots + slot * o.slot_stride + head * size;
#pragma unroll
    for (uint32_t i = 0; i < kChainTiles; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e)
        if (holds(i)) m[i][e] = before[place(i, e)];
  }

  const auto fetch = [&](uint32_t chunk) {
    const uint32_t i = chunk - first_chunk, first_row = chunk * kChunk;
    const uint32_t rows = min(s.n_rows - first_row, kChunk);
    Stage& stage = stages[i % 2];
    const float* const xbc = o.xbc + uint64_t(first_row) * p.xbc_stride;
    copy_tile<kChainThreads>(stage.b, xbc + p.b_column + group * p.state + first_n, p.xbc_stride, kChunk,
                             rows, p.state - first_n, in_quads);
    copy_tile<kChainThreads>(stage.x, xbc + p.x_column + head * p.width + first_col, p.xbc_stride, kChunk,
                             rows, p.width - first_col, in_quads);
    if (threadIdx.x < kChunk)
      copy_async<4>(stage.after + threadIdx.x,
                    scratch.decays[uint64_t(i) * p.heads + head].after + threadIdx.x);
  };
  if (first_chunk < end) fetch(first_chunk);
  commit_copies();
  for (uint32_t chunk = first_chunk; chunk < end; ++chunk) {
    if (chunk + 1 < end) fetch(chunk + 1);
    commit_copies();
    const uint64_t of_head = uint64_t(chunk - first_chunk) * p.heads + head;
    const float decay = scratch.decays[of_head].until[kChunk - 1];
#pragma unroll
    for (uint32_t i = 0; i < kChainTiles; ++i)
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r)
        if (holds(i))
          *reinterpret_cast<float2*>(scratch.states + of_head * size + place(i, 2 * r)) =
              make_float2(m[i][2 * r], m[i][2 * r + 1]);
    wait_copies<1>();
    __syncthreads();
    const Stage& stage = stages[(chunk - first_chunk) % 2];
    float sums[kChainTiles][4] = {};
#pragma unroll 2
    for (uint32_t row = 2 * t; row < kChunk; row += 8) {
      const float* const b = stage.b + row * kTileStride + tile_n + g;
      const float* const x = stage.x + row * kTileStride + tile_col + g;
      const FragmentA of_b({b[0], b[8], b[kTileStride], b[kTileStride + 8]});
      const float after[2] = {stage.after[row], stage.after[row + 1]};
#pragma unroll
      for (uint32_t i = 0; i < kChainTiles; ++i)
        multiply(sums[i], of_b, FragmentB(after[0] * x[i * 8], after[1] * x[kTileStride + i * 8]));
    }
#pragma unroll
    for (uint32_t i = 0; i < kChainTiles; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) m[i][e] = decay * m[i][e] + sums[i][e];
    __syncthreads();
  }
  float* const to = o.slots + s.state_to * o.slot_stride + head * size;
#pragma unroll
  for (uint32_t i = 0; i < kChainTiles; ++i)
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e)
      if (holds(i)) to[place(i, e)] = m[i][e];
}

// ---- y ----

// A block has a chunk of kTileCols columns of a head, and a warp 16 rows of these.
constexpr uint32_t kYThreads = kRowTiles * kWarp, kYTiles = kTileCols / 8;

struct YShared {
  Decays decays;
  float x[kTile];
  // The state follows, [state][kTileStride].
};

__global__ void __launch_bounds__(kYThreads)
    ssm_y_kernel(const StepParams* step, SsmParams p, SsmOperands o, uint32_t first_chunk, bool in_quads,
                 Scratch scratch) {
  extern __shared__ uint4 shared[];
  YShared& m = *reinterpret_cast<YShared*>(shared);
  float* const state = reinterpret_cast<float*>(&m + 1);
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const uint32_t first_col = blockIdx.x * kTileCols, head = blockIdx.y, chunk = blockIdx.z;
  const uint32_t group = head / (p.heads / p.groups), cols = min(p.width - first_col, kTileCols);
  const float d = o.d[head];
  const StepParams s = begin_kernel(step);
  const uint32_t first_row = (first_chunk + chunk) * kChunk;
  if (first_row >= s.n_rows) return;
  const uint32_t rows = min(s.n_rows - first_row, kChunk);

  const float* const xbc = o.xbc + uint64_t(first_row) * p.xbc_stride;
  const uint64_t of_head = uint64_t(chunk) * p.heads + head;
  copy_tile<kYThreads>(state, scratch.states + of_head * p.state * p.width + first_col, p.width, p.state,
                       p.state, cols, true);
  copy_tile<kYThreads>(m.x, xbc + p.x_column + head * p.width + first_col, p.xbc_stride, kChunk, rows, cols,
                       in_quads);
  for (uint32_t i = threadIdx.x; i < sizeof(Decays) / sizeof(uint4); i += kYThreads)
    copy_async<16>(reinterpret_cast<uint4*>(&m.decays) + i,
                   reinterpret_cast<const uint4*>(scratch.decays + of_head) + i);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  const uint32_t tile_row = warp * kTileRows, row0 = tile_row + g;  // and row0 + 8
  if (tile_row >= rows) return;

  float y[kYTiles][4] = {};
  const float* const of_c = xbc + p.c_column + group * p.state + 2 * t;
#pragma unroll 2
  for (uint32_t n = 0; n < p.state; n += 8) {
    float c[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = row0 + i % 2 * 8;
      c[i] = row < rows ? of_c[uint64_t(row) * p.xbc_stride + n + i / 2] : 0.0f;
    }
    const FragmentA a(c);
    const float* const of = state + (n + 2 * t) * kTileStride + g;
#pragma unroll
    for (uint32_t i = 0; i < kYTiles; ++i)
      if (i * 8 < cols) multiply(y[i], a, FragmentB(of[i * 8], of[kTileStride + i * 8]));
  }
#pragma unroll
  for (uint32_t i = 0; i < kYTiles; ++i)
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) y[i][e] *= m.decays.until[row0 + e / 2 * 8];

  // What row i takes of x of row j.
  const float* const products = scratch.products + (uint64_t(chunk) * p.groups + group) * kChunk * kChunk;
  const auto weight = [&](uint32_t i, uint32_t j) {
    if (j > i) return 0.0f;
    const float g_difference = (m.decays.high[i] - m.decays.high[j]) + (m.decays.low[i] - m.decays.low[j]);
    return expf(g_difference) * m.decays.delta[j] * products[i * kChunk + j];
  };
  for (uint32_t j = 2 * t; j < tile_row; j += 8) {
    const FragmentA a({weight(row0, j), weight(row0 + 8, j), weight(row0, j + 1), weight(row0 + 8, j + 1)});
    const float* const x = m.x + j * kTileStride + g;
#pragma unroll
    for (uint32_t i = 0; i < kYTiles; ++i)
      if (i * 8 < cols) multiply(y[i], a, FragmentB(x[i * 8], x[kTileStride + i * 8]));
  }
  // Of the rows around the diagonal only those terms that there are: a value that is not a number must not
  // reach earlier rows. A lane computes the weights of every fourth row, and all of its group use them.
  float weights[kTileRows / 4][2];
#pragma unroll
  for (uint32_t k = 0; k < kTileRows / 4; ++k)
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) weights[k][r] = weight(row0 + r * 8, tile_row + 4 * k + t);
#pragma unroll
  for (uint32_t j = 0; j < kTileRows; ++j) {
    const float* const x = m.x + (tile_row + j) * kTileStride + 2 * t;
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      const float of = __shfl_sync(~0u, weights[j / 4][r], j % 4, 4);
      if (j > g + r * 8) continue;
#pragma unroll
      for (uint32_t i = 0; i < kYTiles; ++i) {
        y[i][2 * r] += of * x[i * 8];
        y[i][2 * r + 1] += of * x[i * 8 + 1];
      }
    }
  }

#pragma unroll
  for (uint32_t r = 0; r < 2; ++r) {
    const uint32_t row = row0 + r * 8;
    if (row >= rows) continue;
    const float* const x = m.x + row * kTileStride + 2 * t;
    float* const to = o.y + uint64_t(first_row + row) * p.y_stride + head * p.width + first_col + 2 * t;
#pragma unroll
    for (uint32_t i = 0; i < kYTiles; ++i) {
      if (i * 8 >= cols) continue;
      to[i * 8] = y[i][2 * r] + d * x[i * 8];
      to[i * 8 + 1] = y[i][2 * r + 1] + d * x[i * 8 + 1];
    }
  }
}

}  // namespace

uint64_t ssm_chunk_bytes(uint32_t heads, uint32_t groups, uint32_t values, uint32_t state) {
  return sizeof(float) * (uint64_t(values) * state + uint64_t(groups) * kChunk * kChunk) +
         heads * sizeof(Decays);
}

// Models have fewer groups than heads, and most have smaller states: this is what there is at most.
uint64_t ssm_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  if (s.chunk < kLeastChunkRows) return 0;
  const uint64_t chunk = ssm_chunk_bytes(m.ssm_heads, m.ssm_heads, m.mixer_out, kMostSsmState);
  return m.ssm_heads ? std::min(kPassBytes, ceil_div(s.chunk, kChunk) * chunk) : 0;
}

void ssm_chunks(const Launch& l, const SsmParams& p, const SsmOperands& o) {
  const uint32_t chunks = static_cast<uint32_t>(ceil_div(l.max_rows, kChunk)), values = p.heads * p.width;
  const uint64_t bytes = ssm_chunk_bytes(p.heads, p.groups, values, p.state);
  const uint32_t most =
      static_cast<uint32_t>(std::min<uint64_t>(chunks, std::min(kPassBytes, l.scratch_bytes) / bytes));
  const auto col_tiles = static_cast<uint32_t>(ceil_div(p.width, kTileCols)),
             state_tiles = static_cast<uint32_t>(ceil_div(p.state, kTileCols));
  const bool in_quads = (reinterpret_cast<uintptr_t>(o.xbc) / sizeof(float) | p.x_column | p.b_column |
                         p.c_column | p.xbc_stride) %
                            4 ==
                        0;
  Scratch scratch;
  scratch.states = reinterpret_cast<float*>(l.scratch);
  scratch.products = scratch.states + uint64_t(most) * values * p.state;
  scratch.decays = reinterpret_cast<Decays*>(scratch.products + uint64_t(most) * p.groups * kChunk * kChunk);
  for (uint32_t first = 0; first < chunks; first += most) {
    const uint32_t now = std::min(most, chunks - first);
    launch(l, ssm_pairs_kernel, dim3(now, p.groups, kRowTiles), kPairThreads, 0, l.step, p, o, first,
           scratch);
    launch(l, ssm_chain_kernel, dim3(col_tiles, state_tiles, p.heads), kChainThreads, 2 * sizeof(Stage),
           l.step, p, o, first, most, in_quads, scratch);
    launch(l, ssm_y_kernel, dim3(col_tiles, p.heads, now), kYThreads,
           sizeof(YShared) + uint64_t(p.state) * kTileStride * sizeof(float), l.step, p, o, first, in_quads,
           scratch);
  }
}

}  // namespace thimble::cuda
