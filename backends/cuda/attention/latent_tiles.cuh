// Attention whose values are channels of the keys, after those that rotate: all query vectors of a block see
// the same rows, so tensor cores multiply a tile of rows twice, as keys and as values. Shared by the kernels
// for the view and for the pool. Device side.
#pragma once

#include "backends/cuda/attention/attention_view.cuh"
#include "backends/cuda/mma.cuh"

namespace thimble::cuda {

// The shape of a block: kVectors query vectors (16, 32, 64), and tiles of kKeys rows (32, 64). A wide row has
// up to 576 channels, of which up to 512 are values; a narrow one has up to 192 and 128.
//
// Rows in shared memory are arrays of 16-byte chunks, 8 channels each. Chunk c of row r is at place c ^ r %
// 8, so that the same chunk of eight rows is in different banks. Padding would take 1 KiB too much.
template <uint32_t kVectorsOf, uint32_t kKeysOf, bool kWideOf>
struct LatentShape {
  static constexpr bool kWide = kWideOf;
  static constexpr uint32_t kVectors = kVectorsOf, kKeys = kKeysOf;
  static constexpr uint32_t kWarps = 8, kThreads = kWarps * kWarp;
  static constexpr uint32_t kDim = kWide ? 576 : 192, kValues = kWide ? 512 : 128;
  static constexpr uint32_t kMostRotated = kDim - kValues;
  static constexpr uint32_t kChunks = kDim / 8;
  static constexpr uint32_t kStages = 2;  // tiles in shared memory
  // The product of queries and keys: a warp has kRows times 16 vectors and kColumns times 8 keys.
  static constexpr uint32_t kRowGroups = kVectors >= 32 ? 2 : 1;
  static constexpr uint32_t kKeyGroups = kWarps / kRowGroups < kKeys / 8 ? kWarps / kRowGroups : kKeys / 8;
  static constexpr uint32_t kRows = kVectors / 16 / kRowGroups, kColumns = kKeys / 8 / kKeyGroups;
  // The product of weights and values: a warp has kValueRows times 16 vectors and kValueColumns channels.
  static constexpr uint32_t kValueRowGroups = kVectors == 64 ? 2 : 1;
  static constexpr uint32_t kValueRows = kVectors / 16 / kValueRowGroups,
                            kValueColumns = kValues * kValueRowGroups / kWarps;
  // Stride in halves between vectors' weights: an odd number of 16-byte units.
  static constexpr uint32_t kWeightStride = kKeys + 8;
  // Shared memory: queries, tiles, weights, and a float per vector and group of keys.
  static constexpr uint32_t kQueryChunks = kVectors * kChunks, kTileChunks = kKeys * kChunks;
  static constexpr uint32_t kWeightBytes = kVectors * kWeightStride * sizeof(__half);
  static constexpr uint32_t kShared = (kQueryChunks + kStages * kTileChunks) * sizeof(uint4) + kWeightBytes +
                                      kKeyGroups * kVectors * sizeof(float);
  static_assert(kColumns == 1 || kColumns == 2);
  static_assert(kValueColumns % 16 == 0 && kWeightBytes % sizeof(uint4) == 0 && kChunks % 8 == 0);
};

// Whether rows are narrow. Host side.
inline bool is_narrow(const AttentionParams& p) {
  using Narrow = LatentShape<16, 32, false>;
  return p.head_dim <= Narrow::kDim && p.head_dim - p.rope.n_rot <= Narrow::kValues &&
         p.rope.n_rot <= Narrow::kMostRotated;
}

// The arrays of a block in shared memory.
template <typename Shape>
struct LatentMemory {
  uint4 *queries, *tiles;
  __half* weights;   // [kVectors][kWeightStride]
  float* of_groups;  // [kKeyGroups][kVectors]

  __device__ explicit LatentMemory(uint4* shared)
      : queries(shared),
        tiles(queries + Shape::kQueryChunks),
        weights(reinterpret_cast<__half*>(tiles + Shape::kStages * Shape::kTileChunks)),
        of_groups(reinterpret_cast<float*>(weights + Shape::kVectors * Shape::kWeightStride)) {}

  // Where a chunk of a row is, in the queries or in a tile.
  __device__ static uint32_t place(uint32_t row, uint32_t chunk) {
    return row * Shape::kChunks + (chunk ^ row % 8);
  }
  __device__ uint4* tile(uint32_t number) const {
    return tiles + number % Shape::kStages * Shape::kTileChunks;
  }
  __device__ void store_query(uint32_t vector, uint32_t channel, __half x) const {
    reinterpret_cast<__half*>(queries + place(vector, channel / 8))[channel % 8] = x;
  }
};

// Eight threads copy a row of a tile, 128 bytes at a time: a thread has rows own_row(0) to own_row(kOwnRows -
// 1) of each tile, and of them every eighth chunk.
template <typename Shape>
inline constexpr uint32_t kOwnRows = Shape::kKeys * 8 / Shape::kThreads;
template <typename Shape>
__device__ inline uint32_t own_row(uint32_t i) {
  return i * (Shape::kThreads / 8) + threadIdx.x / 8;
}
// Starts copying a row, with zeros instead of one that is not there, and for channels from head_dim on.
// `from` is valid in any case.
template <typename Shape, typename Format>
__device__ inline void copy_row(uint4* tile, uint32_t row, const typename Format::Unit* from, bool there,
                                uint32_t head_dim) {
#pragma unroll
  for (uint32_t j = 0; j < Shape::kChunks / 8; ++j) {
    const uint32_t chunk = threadIdx.x % 8 + 8 * j;
    const bool valid = there && chunk * 8 < head_dim;
    const typename Format::Unit* const source = from + (valid ? chunk * Format::kChunkUnits : 0);
    uint4* const to = tile + LatentMemory<Shape>::place(row, chunk);
    if constexpr (Format::kHasHalves)
      copy_async<16>(to, source, valid);
    else
      *to = valid ? Format::halves(*reinterpret_cast<const uint4*>(source)) : uint4{};
  }
}

// Rotates, scales and rounds the block's query vectors. of(vector): the numbers of a vector and its position;
// null for a vector of zeros.
struct LatentQuery {
  const float* q;
  uint32_t position;
};
template <typename Shape, typename Of>
__device__ inline void load_latent_queries(const LatentMemory<Shape>& memory, const AttentionParams& p,
                                           const Rope& rope, const Of& of) {
  const float scale = p.scale * kLog2E;
  const uint32_t pairing = p.rope.pairing, last_channel = p.head_dim - 1;
#pragma unroll 1
  for (uint32_t vector = threadIdx.x / kWarp; vector < Shape::kVectors; vector += Shape::kWarps) {
    const LatentQuery own = of(vector);
#pragma unroll
    for (uint32_t i = 0; i < Shape::kDim / 2 / kWarp; ++i) {
      const uint32_t pair = i * kWarp + threadIdx.x % kWarp;
      const bool rotates = pair < rope.pairs;
      const uint32_t c0 = rotates ? first_of_pair(pair, pairing) : 2 * pair,
                     c1 = rotates ? second_of_pair(pair, pairing, rope.pairs) : 2 * pair + 1;
      const bool there = own.q && c1 <= last_channel;  // head_dim is even
      const float x = there ? own.q[c0] * scale : 0, y = there ? own.q[c1] * scale : 0;
      const float2 angle = rotates ? rope.angle(own.position, pair) : float2{1, 0};
      memory.store_query(vector, c0, __float2half_rn(x * angle.x - y * angle.y));
      memory.store_query(vector, c1, __float2half_rn(x * angle.y + y * angle.x));
    }
  }
}

// The running softmax of a block's vectors. Scores and weights are in the layout of tensor core results: lane
// i has vectors i / 4 and i / 4 + 8 of 16, and of each 8 keys or channels number 2 * (i % 4) and the next.
// All threads call these functions.
template <typename Shape>
class LatentTiles {
  static constexpr uint32_t kRows = Shape::kRows, kColumns = Shape::kColumns;
  static constexpr uint32_t kValueRows = Shape::kValueRows, kValueTiles = Shape::kValueColumns / 8;

 public:
  // `first_value`: the first channel that is a value, a multiple of 8. begins(vector): {maximum, sum} from
  // which a vector starts; value(vector, channel): its output, two neighbouring channels.
  template <typename Begins, typename Value>
  __device__ LatentTiles(const LatentMemory<Shape>& memory, uint32_t first_value, const Begins& begins,
                         const Value& value)
      : memory_(memory), first_value_chunk_(first_value / 8) {
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float2 own = begins(vector(r, half));
        peak_[r][half] = own.x;
        sum_[r][half] = key_group() == 0 && lane() % 4 == 0 ? own.y : 0;
      }
#pragma unroll
    for (uint32_t r = 0; r < kValueRows; ++r)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        value_peak_[r][half] = begins(value_vector(r, half)).x;
#pragma unroll
        for (uint32_t n = 0; n < kValueTiles; ++n) {
          const float2 own = value(value_vector(r, half), value_channel(n));
          out_[r][n][2 * half] = own.x;
          out_[r][n][2 * half + 1] = own.y;
        }
      }
  }

  // Adds a tile, which has arrived and is visible to all threads. masks: whether seen(vector) is asked for
  // the keys that a vector sees, [x, y) of the tile. `cap` is scaled like scores. The tile and the weights
  // may be overwritten after the next barrier.
  template <typename Seen>
  __device__ void add(const uint4* tile, float cap, bool masks, const Seen& seen) {
    float scores[kRows][kColumns][4] = {};
    if (multiplies()) {
      multiply(tile, scores);
      if (cap != 0)
        for_each(scores, [&](uint32_t, uint32_t, uint32_t, uint32_t, float& s) { s = soft_cap(s, cap); });
      if (masks) mask(scores, seen);
#pragma unroll
      for (uint32_t r = 0; r < kRows; ++r)
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          float top = -kInfinity;
#pragma unroll
          for (uint32_t n = 0; n < kColumns; ++n)
            top = fmaxf(top, fmaxf(scores[r][n][2 * half], scores[r][n][2 * half + 1]));
          top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
          top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
          if (lane() % 4 == 0) memory_.of_groups[key_group() * Shape::kVectors + vector(r, half)] = top;
        }
    }
    __syncthreads();  // the groups' maxima are visible
    if (multiplies()) weigh(scores);
    rescale();
    __syncthreads();  // the weights are visible
    add_values(tile);
  }

  // The sums of all vectors, which total() then returns for the threads' value vectors.
  __device__ void end() {
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        float& sum = sum_[r][half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (multiplies() && lane() % 4 == 0)
          memory_.of_groups[key_group() * Shape::kVectors + vector(r, half)] = sum;
      }
    __syncthreads();
  }
  // After end(), calls store(vector, {maximum, sum}, channel, two outputs) for the lane's outputs, which are
  // not divided by the sum, with first(vector, {maximum, sum}) before those of a vector.
  template <typename First, typename Store>
  __device__ void each_output(const First& first, const Store& store) const {
#pragma unroll
    for (uint32_t r = 0; r < kValueRows; ++r)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t v = value_vector(r, half);
        float sum = 0;
#pragma unroll
        for (uint32_t group = 0; group < Shape::kKeyGroups; ++group)
          sum += memory_.of_groups[group * Shape::kVectors + v];
        const auto state = first(v, float2{value_peak_[r][half], sum}, value_slice() == 0 && lane() % 4 == 0);
#pragma unroll
        for (uint32_t n = 0; n < kValueTiles; ++n)
          store(state, value_channel(n), float2{out_[r][n][2 * half], out_[r][n][2 * half + 1]});
      }
  }

 private:
  __device__ static uint32_t lane() { return threadIdx.x % kWarp; }
  __device__ static uint32_t warp() { return threadIdx.x / kWarp; }
  // With few keys, some warps only multiply values.
  __device__ static uint32_t key_group() { return warp() / Shape::kRowGroups; }
  __device__ static bool multiplies() { return key_group() < Shape::kKeyGroups; }
  __device__ static uint32_t first_vector(uint32_t r) {
    return (warp() % Shape::kRowGroups * kRows + r) * 16;
  }
  __device__ static uint32_t vector(uint32_t r, uint32_t half) {
    return first_vector(r) + lane() / 4 + 8 * half;
  }
  __device__ static uint32_t key(uint32_t n) { return (key_group() * kColumns + n) * 8 + 2 * (lane() % 4); }
  __device__ static uint32_t value_slice() { return warp() / Shape::kValueRowGroups; }
  __device__ static uint32_t first_value_vector(uint32_t r) {
    return (warp() % Shape::kValueRowGroups * kValueRows + r) * 16;
  }
  __device__ static uint32_t value_vector(uint32_t r, uint32_t half) {
    return first_value_vector(r) + lane() / 4 + 8 * half;
  }
  __device__ static uint32_t value_channel(uint32_t n) {
    return value_slice() * Shape::kValueColumns + 8 * n + 2 * (lane() % 4);
  }

  // Calls each(r, half, n, i, score) for the lane's scores.
  template <typename Each>
  __device__ static void for_each(float (&scores)[kRows][kColumns][4], const Each& each) {
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r)
#pragma unroll
      for (uint32_t n = 0; n < kColumns; ++n)
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) each(r, i / 2, n, i % 2, scores[r][n][i]);
  }

  __device__ void multiply(const uint4* tile, float (&scores)[kRows][kColumns][4]) const {
    // Matrices are loaded by (rows, rows + 8) x (channels, channels + 8); keys, which are the columns of the
    // product, the other way round. With 8 keys, four matrices are 32 channels.
    const uint32_t turn = lane() % 8;
    const uint4* const q = memory_.queries + (first_vector(0) + lane() % 16) * Shape::kChunks;
    const uint4* const k =
        tile + (key_group() * kColumns * 8 + (kColumns == 2 ? lane() / 16 * 8 : 0) + turn) * Shape::kChunks;
#pragma unroll 3
    for (uint32_t first = 0; first < Shape::kChunks; first += 8)
#pragma unroll
      for (uint32_t pair = 0; pair < 8; pair += 4) {
        uint32_t keys[2][4];
        if constexpr (kColumns == 2) {
          load_matrices(keys[0], k + first + ((pair + lane() / 8 % 2) ^ turn));
          load_matrices(keys[1], k + first + ((pair + 2 + lane() / 8 % 2) ^ turn));
        } else {
          load_matrices(keys[0], k + first + ((pair + lane() / 8) ^ turn));
        }
#pragma unroll
        for (uint32_t r = 0; r < kRows; ++r)
#pragma unroll
          for (uint32_t c = 0; c < 2; ++c) {
            uint32_t a[4];
            load_matrices(a, q + r * 16 * Shape::kChunks + first + ((pair + 2 * c + lane() / 16) ^ turn));
            if constexpr (kColumns == 2) {
              multiply_f16(scores[r][0], a, keys[c][0], keys[c][1]);
              multiply_f16(scores[r][1], a, keys[c][2], keys[c][3]);
            } else {
              multiply_f16(scores[r][0], a, keys[0][2 * c], keys[0][2 * c + 1]);
            }
          }
      }
  }

  template <typename Seen>
  __device__ void mask(float (&scores)[kRows][kColumns][4], const Seen& seen) const {
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint2 range = seen(vector(r, half));
#pragma unroll
        for (uint32_t n = 0; n < kColumns; ++n)
#pragma unroll
          for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t own = key(n) + i;
            if (own < range.x || own >= range.y) scores[r][n][2 * half + i] = -kInfinity;
          }
      }
  }

  // The largest score of a vector so far.
  __device__ float new_peak(float peak, uint32_t vector) const {
#pragma unroll
    for (uint32_t group = 0; group < Shape::kKeyGroups; ++group)
      peak = fmaxf(peak, memory_.of_groups[group * Shape::kVectors + vector]);
    return peak;
  }
  __device__ static float base_of(float peak) { return peak == -kInfinity ? 0 : peak; }  // no key seen yet

  // Stores the weights of the lane's scores.
  __device__ void weigh(const float (&scores)[kRows][kColumns][4]) {
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t v = vector(r, half);
        const float peak = new_peak(peak_[r][half], v), base = base_of(peak);
        float& sum = sum_[r][half];
        sum *= fast_exp2(peak_[r][half] - base);
        peak_[r][half] = peak;
#pragma unroll
        for (uint32_t n = 0; n < kColumns; ++n) {
          const float x = fast_exp2(scores[r][n][2 * half] - base),
                      y = fast_exp2(scores[r][n][2 * half + 1] - base);
          sum += x + y;
          *reinterpret_cast<__half2*>(memory_.weights + v * Shape::kWeightStride + key(n)) =
              __floats2half2_rn(x, y);
        }
      }
  }
  // Scales the outputs to the new maxima. With thousands of keys a new maximum is rare, so most tiles skip
  // the multiplication.
  __device__ void rescale() {
#pragma unroll
    for (uint32_t r = 0; r < kValueRows; ++r) {
      float scale[2];
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float peak = new_peak(value_peak_[r][half], value_vector(r, half));
        scale[half] = fast_exp2(value_peak_[r][half] - base_of(peak));
        value_peak_[r][half] = peak;
      }
      if (!__any_sync(~0u, scale[0] != 1 || scale[1] != 1)) continue;
#pragma unroll
      for (uint32_t n = 0; n < kValueTiles; ++n)
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) out_[r][n][i] *= scale[i / 2];
    }
  }

  __device__ void add_values(const uint4* tile) {
    const uint32_t first_chunk =
        first_value_chunk_ + value_slice() * (Shape::kValueColumns / 8) + lane() / 16;
    const uint4* const v = tile + lane() % 16 * Shape::kChunks;
    const __half* const w =
        memory_.weights + (first_value_vector(0) + lane() % 16) * Shape::kWeightStride + lane() / 16 * 8;
#pragma unroll
    for (uint32_t k = 0; k < Shape::kKeys; k += 16) {
      uint32_t a[kValueRows][4];
#pragma unroll
      for (uint32_t r = 0; r < kValueRows; ++r) load_matrices(a[r], w + r * 16 * Shape::kWeightStride + k);
#pragma unroll
      for (uint32_t n = 0; n < kValueTiles; n += 2) {
        uint32_t values[4];
        load_matrices_transposed(values, v + k * Shape::kChunks + ((first_chunk + n) ^ lane() % 8));
#pragma unroll
        for (uint32_t r = 0; r < kValueRows; ++r) {
          multiply_f16(out_[r][n], a[r], values[0], values[1]);
          multiply_f16(out_[r][n + 1], a[r], values[2], values[3]);
        }
      }
    }
  }

  LatentMemory<Shape> memory_;
  uint32_t first_value_chunk_;
  float out_[kValueRows][kValueTiles][4];
  // The maxima of the warp's vectors in both products, and this lane's share of their sums.
  float peak_[kRows][2], sum_[kRows][2], value_peak_[kValueRows][2];
};

}  // namespace thimble::cuda
