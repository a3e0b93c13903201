// attention of a single row to a pool of which keys or values have blocks. On plain cores, decoding would
// take longer than reading, so matrix units do the transforms, the scores and the sums: a warp takes 16
// entries at a time, and up to 8 query heads, whose queries and weights are sums of two f16 vectors, high and
// low.
//
// Keys: H is multiplied by the codes of 16 keys in integers, exactly. The sums are scaled and rotated in f32,
// as on plain cores, and rounded to f16 for the product with the queries. Values: codes times scales are
// rounded to f16 and summed; H is linear, so only the sum over all entries is multiplied by it.
//
// Fragments of a matrix instruction: lane 4 g + t has row or column g and elements 2 t and 2 t + 1 of each 8.
#include "backends/cuda/attention/block_codes.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/soft_cap.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kHeads = 8, kRows = 16;  // query heads per pass, and entries per step
constexpr uint32_t kMostWarps = 12;         // of 168 registers per thread

// 16 rows of a format in shared memory: the codes of each, with kPad bytes between rows, then the scales. A
// warp copies them in pieces of kPiece bytes, of which rows and scales consist.
template <typename Format, uint32_t kDim, uint32_t kPad>
struct RowTile {
  static constexpr uint32_t kBits = kBitsOf<Format>, kCodes = kDim * kBits / 8,
                            kScales = kBits == 16 ? 0 : kDim / 32 * 2, kStride = kCodes + kPad,
                            kBytes = kRows * (kStride + kScales), kPiece = kBits == 16 ? 16 : kScales,
                            kPieces = kCodes / kPiece, kAtOnce = kWarp / kPieces;
  static_assert(kPieces * kAtOnce == kWarp && kRows % kAtOnce == 0);

  // `rows`: the run's row 0. Lane held + i has the entry of row i. Rows from `count` on become zeros.
  __device__ static void copy(std::byte* to, const typename Format::Unit* rows, uint32_t entry, uint32_t held,
                              uint32_t count) {
    const uint32_t lane = threadIdx.x % kWarp, column = lane % kPieces * kPiece;
    const std::byte* const from = reinterpret_cast<const std::byte*>(rows);
#pragma unroll
    for (uint32_t r = 0; r < kRows; r += kAtOnce) {
      const uint32_t row = r + lane / kPieces, e = __shfl_sync(~0u, entry, held + row);
      const bool valid = row < count;
      copy_async<kPiece>(to + row * kStride + column,
                         from + (valid ? uint64_t(e) * (kCodes + kScales) + column : 0), valid);
    }
    if constexpr (kScales > 0) {
      const uint32_t row = lane % kRows, e = __shfl_sync(~0u, entry, held + row);
      const bool valid = row < count;
      if (lane < kRows)
        copy_async<kScales>(to + kRows * kStride + row * kScales,
                            from + (valid ? uint64_t(e) * (kCodes + kScales) + kCodes : 0), valid);
    }
  }
};

// The two channels of key g and the two of key g + 8 of which a lane has the sums: 2 t and 2 t + 1 of each 8.
struct KeyPart {
  float x[4];
};

// How a lane reads its part of 16 keys.
template <typename Format, uint32_t kDim>
class KeyReader {
 public:
  using Tile = RowTile<Format, kDim, 16>;  // so that lanes g of the same t read different banks

  // Loads channels [32 block, 32 block + 32).
  __device__ void load(const std::byte* tile, uint32_t block, KeyPart (&parts)[4]) const {
    const std::byte* const row = tile + g() * Tile::kStride;
    if constexpr (kBits == 16) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t at = (32 * block + 8 * j + 2 * t()) * 2;
        const float2 own = __half22float2(*reinterpret_cast<const __half2*>(row + at)),
                     next = __half22float2(*reinterpret_cast<const __half2*>(row + 8 * Tile::kStride + at));
        parts[j] = {own.x, own.y, next.x, next.y};
      }
    } else {
      uint32_t codes[4];
      const uint32_t* const own_word = reinterpret_cast<const uint32_t*>(row + block * 4 * kBits) + t();
      const uint32_t* const next_word = own_word + 8 * Tile::kStride / 4;
      const uint32_t own = *own_word, next = *next_word;
      if constexpr (kBits == 8) {
        codes[0] = own, codes[1] = next, codes[2] = own_word[4], codes[3] = next_word[4];
      } else {
        codes[0] = own & 0x0f0f0f0f, codes[1] = next & 0x0f0f0f0f;
        codes[2] = own >> 4 & 0x0f0f0f0f, codes[3] = next >> 4 & 0x0f0f0f0f;
      }
      const __half* const scales = reinterpret_cast<const __half*>(tile + kRows * Tile::kStride) + block;
      const float own_scale = __half2float(scales[g() * (kDim / 32)]),
                  next_scale = __half2float(scales[(g() + 8) * (kDim / 32)]);
      const float own_zero = -kMagic * own_scale, next_zero = -kMagic * next_scale;
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        int32_t sums[4];
        multiply_codes<kBits>(sums, codes, columns_.of[j], first_sum<kBits>(j), __float_as_int(kMagic));
        parts[j] = {fmaf(__int_as_float(sums[0]), own_scale, own_zero),
                    fmaf(__int_as_float(sums[1]), own_scale, own_zero),
                    fmaf(__int_as_float(sums[2]), next_scale, next_zero),
                    fmaf(__int_as_float(sums[3]), next_scale, next_zero)};
      }
    }
  }

 private:
  static constexpr uint32_t kBits = kBitsOf<Format>;
  __device__ static uint32_t g() { return threadIdx.x % kWarp / 4; }
  __device__ static uint32_t t() { return threadIdx.x % 4; }

  [[no_unique_address]] HadamardColumns<kBits> columns_;
};

// Sums of values. Element n of matrix `tile` is channel channel(tile, n).
template <typename Format, uint32_t kDim>
class ValueSums {
 public:
  using Tile = RowTile<Format, kDim, 16>;
  static constexpr uint32_t kTiles = kDim / 8;

  __device__ static uint32_t channel(uint32_t tile, uint32_t n) {
    if constexpr (kBits == 16) return 8 * tile + n;
    if constexpr (kBits == 8) return tile / 2 * 16 + 2 * n + tile % 2;
    return tile / 4 * 32 + 4 * n + tile % 4;
  }

  // sums[tile] += weights[16][16] values[16][8].
  __device__ static void add(float (&sums)[kTiles][4], const uint32_t (&weights)[4], const std::byte* tile) {
    const uint32_t lane = threadIdx.x % kWarp, t = lane % 4;
    // Lane i passes row i % 16, the first or the second 16 bytes of 32.
    const std::byte* const row = tile + lane % 16 * Tile::kStride + lane / 16 * 16;
    const uint32_t* const scales = reinterpret_cast<const uint32_t*>(tile + kRows * Tile::kStride);
    constexpr uint32_t kPerRow = kDim / 64;  // words of scales
#pragma unroll
    for (uint32_t part = 0; part < Tile::kCodes / 32; ++part) {
      uint32_t r[4];  // of two 8 or 16 or 32 channels: keys 0 to 7, keys 8 to 15
      load_matrices_transposed(r, row + 32 * part);
      if constexpr (kBits == 16) {
        multiply_f16(sums[2 * part], weights, r[0], r[1]);
        multiply_f16(sums[2 * part + 1], weights, r[2], r[3]);
      } else if constexpr (kBits == 8) {
        __half2 scale[2];
        load_scales(scales, kPerRow, t, part, scale);
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
          for (uint32_t odd = 0; odd < 2; ++odd) {
            uint32_t b[2];
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
              // 1024 + 128 + code, for two keys
              const uint32_t biased =
                  __byte_perm(r[2 * half + i] ^ 0x80808080, 0x64646464, odd ? 0x4341 : 0x4240);
              b[i] = bits_of(__hmul2(__hsub2(as_pair(biased), __float2half2_rn(1152)), scale[i]));
            }
            multiply_f16(sums[4 * part + 2 * half + odd], weights, b[0], b[1]);
          }
      } else {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          __half2 scale[2];
          load_scales(scales, kPerRow, t, 2 * part + half, scale);
#pragma unroll
          for (uint32_t i = 0; i < 4; ++i) {
            uint32_t b[2];
#pragma unroll
            for (uint32_t k = 0; k < 2; ++k) {
              const uint32_t word = r[2 * half + k] >> (i / 2 * 8);
              __half2 code;
              if (i % 2 == 0)  // 1024 + 8 + code
                code = __hsub2(as_pair((word & 0x000f000f) | 0x64006400), __float2half2_rn(1032));
              else  // 1024 + 16 * (8 + code)
                code = __hfma2(as_pair((word & 0x00f000f0) | 0x64006400), __float2half2_rn(0.0625f),
                               __float2half2_rn(-72));
              b[k] = bits_of(__hmul2(code, scale[k]));
            }
            multiply_f16(sums[8 * part + 4 * half + i], weights, b[0], b[1]);
          }
        }
      }
    }
  }

 private:
  static constexpr uint32_t kBits = kBitsOf<Format>;

  // The scales of a block of keys 2 t and 2 t + 1, and of keys 2 t + 8 and 2 t + 9.
  __device__ static void load_scales(const uint32_t* scales, uint32_t per_row, uint32_t t, uint32_t block,
                                     __half2 (&scale)[2]) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t* const of_key = scales + (2 * t + 8 * i) * per_row + block / 2;
      scale[i] = as_pair(__byte_perm(of_key[0], of_key[per_row], block % 2 ? 0x7632 : 0x5410));
    }
  }
};

// The shared memory of a warp: stages of keys and values, and its queries.
template <typename Keys, typename Values, uint32_t kDim>
struct WarpMemory {
  using K = KeyReader<Keys, kDim>;
  using V = ValueSums<Values, kDim>;
  static constexpr uint32_t kStage = K::Tile::kBytes + V::Tile::kBytes,
                            kStages = kStage > 3072 ? 2 : 3,  // 50 KB of rows in flight at 12 warps
      kQueries = kDim / 16 * kWarp * sizeof(uint4), kBytes = kStages * kStage + kQueries;
  static_assert(kStage % 16 == 0 && kStages * kStage >= kHeads * kDim * sizeof(float));
};

// Grid: (block among those of a KV head, pass over its group).
template <typename Keys, typename Values, uint32_t kDim, Pairs kPairs>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    attend_blocks_kernel(const StepParams* step, const HeadState* table, AttentionParams p, const float* q,
                         const typename Keys::Unit* k, const typename Values::Unit* v, const uint32_t* lists,
                         Rope rope, Parts parts) {
  using Memory = WarpMemory<Keys, Values, kDim>;
  constexpr uint32_t kStages = Memory::kStages, kBlocks = kDim / 32;
  extern __shared__ uint4 shared[];  // [warps] memory, then the table's low half, then the queries
  __shared__ float2 peaks_and_sums[kMostWarps][kHeads];
  const uint32_t warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp,
                 g = lane / 4, t = lane % 4;
  std::byte* const own = reinterpret_cast<std::byte*>(shared) + warp * Memory::kBytes;
  uint4* const own_queries = reinterpret_cast<uint4*>(own + kStages * Memory::kStage);  // [kDim / 16][lanes]
  float2* const low_half =
      reinterpret_cast<float2*>(reinterpret_cast<std::byte*>(shared) + warps * Memory::kBytes);
  const uint32_t turn_stride = rope.pairs + 8;  // so that neighbouring rows are in different banks
  float* const kept_queries = reinterpret_cast<float*>(low_half + kTile * turn_stride);  // [kHeads][kDim]
  release_successor();
  const bool by_list = p.rope.mode == kRopeList;
  for (uint32_t i = threadIdx.x; i < kTile * (rope.pairs / 2); i += blockDim.x) {
    const uint32_t row = i / (rope.pairs / 2), two = i % (rope.pairs / 2);
    copy_async<16>(low_half + row * turn_stride + 2 * two, rope.table + row * rope.pairs + 2 * two);
  }
  const float factor = by_list ? rope.factor() : 1;  // for keys, whose half of the table lacks it
  const StepParams s = *step;
  const HeadBlocks own_blocks = blocks_around(Attended(s, table, p, lists != nullptr));
  const HeadState state = table[p.first_head + min(own_blocks.head, p.heads - 1)];
  await_predecessor();
  if (own_blocks.head == p.heads) {  // a surplus block
    commit_copies();
    return wait_copies<0>();
  }

  const uint32_t head = p.first_head + own_blocks.head, first_head = blockIdx.z * kHeads;
  const uint32_t heads = min(kHeads, p.group - first_head);
  const float* const all_queries = q + (head * p.group + first_head) * kDim;
  for (uint32_t i = threadIdx.x; i < kHeads * kDim / 4; i += blockDim.x)
    copy_async<16>(kept_queries + 4 * i, all_queries + (i < heads * kDim / 4 ? 4 * i : 0),
                   i < heads * kDim / 4);
  commit_copies();

  // The entries of the window, and the warp's share of them.
  EntryList list = entry_list(lists, head, p.list_capacity, step_entries(s, state));
  const uint32_t hidden = p.window && list.count > p.window ? list.count - p.window : 0;
  list.count -= hidden;
  if (list.entries) list.entries += hidden;
  const uint32_t place = warp * own_blocks.count + block_of_heads() - own_blocks.first;
  const uint32_t share = rows_per_warp(list.count, own_blocks.count * warps, kRows);
  const uint32_t first = min(place * share, list.count), end = min(first + share, list.count);
  const uint64_t run = uint64_t(state.first) + (list.entries ? 0 : hidden);
  const typename Keys::Unit* const keys = k + run * Keys::row_units(kDim);
  const typename Values::Unit* const values = v + run * Values::row_units(kDim);

  // Lanes hold the entries of 32 rows and load the next 32 that much in advance. A group is committed for
  // every step, even one without rows, so that groups can be counted.
  const auto entry_of = [&](uint32_t i) { return list.entries && i < end ? list.entries[i] : i; };
  uint32_t fetched = first, entry = 0, next_entry = entry_of(first + lane);
  const auto fetch = [&](uint32_t stage) {
    if (fetched < end) {
      const uint32_t held = (fetched - first) % kWarp, count = end - fetched;
      if (held == 0) {
        entry = next_entry;
        next_entry = entry_of(fetched + kWarp + lane);
      }
      std::byte* const to = own + stage * Memory::kStage;
      Memory::K::Tile::copy(to, keys, entry, held, count);
      Memory::V::Tile::copy(to + Memory::K::Tile::kBytes, values, entry, held, count);
      fetched += kRows;
    }
    commit_copies();
  };
#pragma unroll 1
  for (uint32_t stage = 0; stage < kStages; ++stage) fetch(stage);
  wait_copies<kStages>();  // waits for the table and the queries
  __syncthreads();

  // Rotates and splits the queries. A lane has head g, and as many channels as of a key.
  const auto turn_queries = [&](uint32_t position) {
    const float2 *const high = rope.table + uint64_t(64 + position / 64) * rope.pairs, *const low =
                                                                                           low_half +
                                                                                           position % 64 *
                                                                                               turn_stride;
    const float scale = p.scale * kLog2E;
    // Channels 8 tile + 2 t and the next, after rotation.
    const auto turned = [&](uint32_t tile) -> float2 {
      const uint32_t c = 8 * tile + 2 * t;
      const float2 own_pair = *reinterpret_cast<const float2*>(kept_queries + g * kDim + c);
      float2 x{own_pair.x * scale, own_pair.y * scale};
      const auto angle = [&](uint32_t pair) -> float2 {
        const float2 a = high[pair], b = low[pair];
        return {(a.x * b.x - a.y * b.y) * factor, (a.x * b.y + a.y * b.x) * factor};
      };
      if constexpr (kPairs == Pairs::kAdjacent) {
        if (c / 2 >= rope.pairs) return x;
        const float2 a = angle(c / 2);
        return {x.x * a.x - x.y * a.y, x.x * a.y + x.y * a.x};
      } else {
        const bool upper = c >= kDim / 2;
        const float2 other_pair =
            *reinterpret_cast<const float2*>(kept_queries + g * kDim + (c ^ (kDim / 2)));
        const float2 y{other_pair.x * scale, other_pair.y * scale}, a = angle(c % (kDim / 2)),
                                                                    b = angle(c % (kDim / 2) + 1);
        return upper ? float2{y.x * a.y + x.x * a.x, y.y * b.y + x.y * b.x}
                     : float2{x.x * a.x - y.x * a.y, x.y * b.x - y.y * b.y};
      }
    };
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < kDim / 16; ++i) {
      const float2 x = turned(2 * i), y = turned(2 * i + 1);
      const Split even(x.x, x.y), odd(y.x, y.y);
      own_queries[i * kWarp + lane] = {even.high, even.low, odd.high, odd.low};
    }
    __syncwarp();
  };

  const typename Memory::K reader;
  // A lane has the scores and weights of head g and entries 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a step.
  float peak = -kInfinity, sum = 0, out[Memory::V::kTiles][4] = {};
  uint32_t stage = 0;
#pragma unroll 1
  for (uint32_t start = first; start < end; start += kRows) {
    const uint32_t first_row = start % kTile;
    if (start == first || (by_list && first_row == 0))
      turn_queries(by_list ? list.count - 1 - (start - first_row) : static_cast<uint32_t>(s.position));
    wait_copies<kStages - 1>();
    __syncwarp();

    const std::byte* const tile = own + stage * Memory::kStage;
    float scores[2][4] = {};  // of entries 0 to 7 and 8 to 15: two of high queries, two of low ones
#pragma unroll
    for (uint32_t b = 0; b < kBlocks / 2; ++b) {
      // Blocks that rotate together, or two neighbours.
      const uint32_t blocks[2] = {kPairs == Pairs::kHalves ? b : 2 * b,
                                  kPairs == Pairs::kHalves ? b + kBlocks / 2 : 2 * b + 1};
      KeyPart x[2][4];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) reader.load(tile, blocks[i], x[i]);
      if (by_list) {
#pragma unroll
        for (uint32_t next = 0; next < 2; ++next) {  // key g, key g + 8
          const float2* const turns = low_half + (first_row + g + 8 * next) * turn_stride;
#pragma unroll
          for (uint32_t j = 0; j < 4; ++j) {
            if constexpr (kPairs == Pairs::kHalves) {
              const float4 a = *reinterpret_cast<const float4*>(turns + 32 * b + 8 * j + 2 * t);
              float(&low)[4] = x[0][j].x, (&high)[4] = x[1][j].x;
              const float2 l{low[2 * next], low[2 * next + 1]}, h{high[2 * next], high[2 * next + 1]};
              low[2 * next] = l.x * a.x - h.x * a.y;
              low[2 * next + 1] = l.y * a.z - h.y * a.w;
              high[2 * next] = l.x * a.y + h.x * a.x;
              high[2 * next + 1] = l.y * a.w + h.y * a.z;
            } else {
#pragma unroll
              for (uint32_t i = 0; i < 2; ++i) {
                const uint32_t pair = 16 * blocks[i] + 4 * j + t;
                const float2 a = pair < rope.pairs ? turns[pair] : float2{1, 0};
                float(&two)[4] = x[i][j].x;
                const float2 l{two[2 * next], two[2 * next + 1]};
                two[2 * next] = l.x * a.x - l.y * a.y;
                two[2 * next + 1] = l.x * a.y + l.y * a.x;
              }
            }
          }
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          const uint4 query = own_queries[(2 * blocks[i] + half) * kWarp + lane];
          const uint32_t a[4] = {query.x, query.y, query.z, query.w};
          const float(&even)[4] = x[i][2 * half].x, (&odd)[4] = x[i][2 * half + 1].x;
          multiply_f16(scores[0], a, pair_of(even[0], even[1]), pair_of(odd[0], odd[1]));
          multiply_f16(scores[1], a, pair_of(even[2], even[3]), pair_of(odd[2], odd[3]));
        }
    }

    float score[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      score[i] = scores[i / 2][i % 2] + scores[i / 2][2 + i % 2];
      if (p.cap != 0) score[i] = soft_cap(score[i], p.cap * kLog2E);
      if (start + 8 * (i / 2) + 2 * t + i % 2 >= end) score[i] = -kInfinity;
    }
    float top = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if (__any_sync(~0u, top > peak)) {
      const float shrink = top > peak ? exp2f(peak - top) : 1;
      peak = fmaxf(peak, top);
      sum *= shrink;
#pragma unroll
      for (uint32_t i = 0; i < Memory::V::kTiles; ++i)
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) out[i][j] *= shrink;
    }
    float weight[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      weight[i] = exp2f(score[i] - peak + kWeightBits);
      sum += weight[i];
    }
    const Split early(weight[0], weight[1]), late(weight[2], weight[3]);
    const uint32_t weights[4] = {early.high, early.low, late.high, late.low};
    Memory::V::add(out, weights, tile + Memory::K::Tile::kBytes);
    __syncwarp();
    fetch(stage);
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }

  // Combine the block's warps, in order. A warp without rows has a peak of -inf and adds zeros.
  constexpr float kUnit = 1.0f / (1 << static_cast<int>(kWeightBits));
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (t == 0) peaks_and_sums[warp][g] = {peak, sum * kUnit};
  wait_copies<0>();
  __syncwarp();
  float* const own_out = reinterpret_cast<float*>(own);  // [kHeads][kDim]: the stages are no longer used
#pragma unroll
  for (uint32_t i = 0; i < Memory::V::kTiles; ++i)
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
      own_out[g * kDim + Memory::V::channel(i, 2 * t + j)] = (out[i][j] + out[i][2 + j]) * kUnit;
  __syncthreads();
  combine_warps < kBitsOf<Values>
      <16, kDim>(
          peaks_and_sums, warps, reinterpret_cast<const std::byte*>(shared), Memory::kBytes, heads,
          threadIdx.x, blockDim.x, parts,
          [&](uint32_t h) {
            return Parts::first(own_blocks, p.group, first_head + h) + block_of_heads() - own_blocks.first;
          });
}

template <typename Keys, typename Values, uint32_t kDim, Pairs kPairs>
void attend(const Launch& l, const Attention& op) {
  using Memory = WarpMemory<Keys, Values, kDim>;
  const AttentionParams& p = op.p;
  const PoolGrid grid = pool_grid(l.card, p.heads, p.group, kHeads);
  const uint32_t block_bytes =
      kTile * (p.rope.n_rot / 2 + 8) * sizeof(float2) + kHeads * kDim * sizeof(float);
  const uint32_t fixed = block_bytes + kMostWarps * kHeads * sizeof(float2);
  // A multiple of 4, because a multiprocessor has four schedulers, unless so many do not fit.
  const uint32_t fit = std::min<uint32_t>(kMostWarps, (l.card.shared_bytes - fixed) / Memory::kBytes),
                 warps = fit < 4 ? fit : fit / 4 * 4;
  attend_and_combine(l, op, grid, [&](const Parts& parts, const Rope& rope) {
    launch(l, attend_blocks_kernel<Keys, Values, kDim, kPairs>, dim3(grid.each, p.heads, grid.passes),
           warps * kWarp, warps * Memory::kBytes + block_bytes, l.step, l.heads + p.head_state, p,
           data<float>(op.q), data<typename Keys::Unit>(op.k.values),
           data<typename Values::Unit>(op.v.values), data<uint32_t>(op.list), rope, parts);
  });
}

template <typename Keys, typename Values, uint32_t kDim>
bool attend(const Launch& l, const Attention& op) {
  const RopeParams& rope = op.p.rope;
  if (rope.pairing == kRopeAdjacent)
    attend<Keys, Values, kDim, Pairs::kAdjacent>(l, op);
  else if (rope.n_rot == kDim)
    attend<Keys, Values, kDim, Pairs::kHalves>(l, op);
  else
    return false;
  return true;
}

// Whether a kernel is worth its code: what --kv asks for, and what kv_types.h makes of it.
template <typename Keys, typename Values>
constexpr bool kUsual = kBitsOf<Values> < 16 && kBitsOf<Values> <= kBitsOf<Keys>;

}  // namespace

bool attend_blocks(const Launch& l, const Attention& op) {
  const RopeParams& rope = op.p.rope;
  if (rope.n_rot == 0 || rope.n_rot % 8 != 0 || reinterpret_cast<uintptr_t>(data<float>(op.q)) % 16 != 0)
    return false;
  bool done = false;
  with_formats(op.k.type, op.v.type, [&]<typename Keys, typename Values>(Keys, Values) {
    if constexpr (kUsual<Keys, Values>) {
      if (op.p.head_dim == 64) done = attend<Keys, Values, 64>(l, op);
      if (op.p.head_dim == 128) done = attend<Keys, Values, 128>(l, op);
    }
  });
  return done;
}

}  // namespace thimble::cuda
