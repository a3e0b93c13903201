// The formats of rows of keys and values. A format stores floats as a row and loads channels of a row as
// floats. Every kernel that reads or writes a row uses it through its template parameter Format;
// with_format() chooses it on the host. Row i of an array begins at rows + i * Format::row_units(head_dim).
//
// Formats that are kPlain store one channel after the other. Their rows consist of chunks of 16 bytes,
// kChunkUnits units, that hold 8 channels, and kernels may copy chunks through shared memory.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// Eight channels as f16.
__device__ inline uint4 narrowed(const float (&x)[8]) {
  uint4 result;
  __half2* const to = reinterpret_cast<__half2*>(&result);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) to[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
  return result;
}

// f16. Values beyond its range are replaced by its largest number and counted; NaN stays.
struct HalfRows {
  using Unit = __half;
  static constexpr bool kPlain = true;
  static constexpr uint32_t kChunkUnits = 8;
  static constexpr bool kHasHalves = true;  // halves() returns the chunk as it is
  __device__ static uint32_t row_units(uint32_t head_dim) { return head_dim; }

  // A warp calls this for neighbouring channels of a row of head_dim, its first lane for a multiple of 32.
  // Adds 1 to `beyond` if the value was replaced.
  __device__ static void store(Unit* row, uint32_t, uint32_t c, float x, uint32_t& beyond) {
    row[c] = __float2half_rn(bounded(x, beyond));
  }
  __device__ static float load(const Unit* row, uint32_t, uint32_t c) { return __half2float(row[c]); }
  __device__ static __half load_half(const Unit* row, uint32_t, uint32_t c) { return row[c]; }
  // Channels 2 * pair and 2 * pair + 1.
  __device__ static float2 load_two(const Unit* row, uint32_t, uint32_t pair) {
    return __half22float2(reinterpret_cast<const __half2*>(row)[pair]);
  }
  // Channels [c, c + 4); c is a multiple of 4.
  __device__ static void load_four(const Unit* row, uint32_t, uint32_t c, float* x) {
    const uint2 words = *reinterpret_cast<const uint2*>(row + c);
    const float2 low = two(words.x), high = two(words.y);
    x[0] = low.x;
    x[1] = low.y;
    x[2] = high.x;
    x[3] = high.y;
  }
  // The channels of a chunk as floats, and as f16 for tensor cores.
  __device__ static void widen(const uint4& chunk, float (&x)[8]) {
    const __half2* h = reinterpret_cast<const __half2*>(&chunk);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float2 f = __half22float2(h[i]);
      x[2 * i] = f.x;
      x[2 * i + 1] = f.y;
    }
  }
  __device__ static uint4 halves(const uint4& chunk) { return chunk; }
  // The same of chunk i of a row.
  __device__ static void load_eight(const Unit* row, uint32_t, uint32_t i, float (&x)[8]) {
    const uint4 chunk = reinterpret_cast<const uint4*>(row)[i];
    widen(chunk, x);
  }
  __device__ static uint4 load_halves(const Unit* row, uint32_t, uint32_t i) {
    return reinterpret_cast<const uint4*>(row)[i];
  }

  // x, or f16's largest number with its sign, and 1 more in `beyond`.
  __device__ static float bounded(float x, uint32_t& beyond) {
    constexpr float kLargest = 65504;
    if (fabsf(x) > kLargest) {
      ++beyond;
      x = copysignf(kLargest, x);
    }
    return x;
  }

 private:
  __device__ static float2 two(const uint32_t& halves) {
    return __half22float2(reinterpret_cast<const __half2&>(halves));
  }
};

#ifdef THIMBLE_TEST_FORMATS
// bf16: shows that kernels depend on a format only through this file. Only tests use it.
struct BrainRows {
  using Unit = __nv_bfloat16;
  static constexpr bool kPlain = true;
  static constexpr uint32_t kChunkUnits = 8;
  static constexpr bool kHasHalves = false;
  __device__ static uint32_t row_units(uint32_t head_dim) { return head_dim; }

  __device__ static void store(Unit* row, uint32_t, uint32_t c, float x, uint32_t&) {
    row[c] = __float2bfloat16_rn(x);
  }
  __device__ static float load(const Unit* row, uint32_t, uint32_t c) { return __bfloat162float(row[c]); }
  __device__ static __half load_half(const Unit* row, uint32_t, uint32_t c) {
    return __float2half_rn(load(row, 0, c));
  }
  __device__ static float2 load_two(const Unit* row, uint32_t, uint32_t pair) {
    return {load(row, 0, 2 * pair), load(row, 0, 2 * pair + 1)};
  }
  __device__ static void load_four(const Unit* row, uint32_t, uint32_t c, float* x) {
    for (uint32_t i = 0; i < 4; ++i) x[i] = load(row, 0, c + i);
  }
  __device__ static void widen(const uint4& chunk, float (&x)[8]) {
    const Unit* of = reinterpret_cast<const Unit*>(&chunk);
    for (uint32_t i = 0; i < 8; ++i) x[i] = load(of, 0, i);
  }
  __device__ static uint4 halves(const uint4& chunk) {
    float x[8];
    widen(chunk, x);
    return narrowed(x);
  }
  __device__ static void load_eight(const Unit* row, uint32_t, uint32_t i, float (&x)[8]) {
    widen(reinterpret_cast<const uint4*>(row)[i], x);
  }
  __device__ static uint4 load_halves(const Unit* row, uint32_t, uint32_t i) {
    return halves(reinterpret_cast<const uint4*>(row)[i]);
  }
};
#endif

// Blocks of 32 channels; isa/kv_formats.h in backends/cpu describes them. A block x is stored as y = H x / 8
// in codes of kBits bits, and loaded as H y / 4. A channel of H y is the sum of 32 codes or their opposites,
// which is exact in integers, so both backends store and load the same bits.
template <uint32_t kBits>
struct BlockRows {
  using Unit = uint32_t;
  static constexpr bool kPlain = false;
  static constexpr bool kHasHalves = false;
  static constexpr uint32_t kChunkUnits = 0;  // it has no chunks
  static constexpr uint32_t kBlock = 32, kBlockUnits = kBlock * kBits / 32;
  static constexpr int kLowest = kBits == 8 ? -127 : -8, kHighest = kBits == 8 ? 127 : 7;

  __device__ static uint32_t row_units(uint32_t head_dim) {
    const uint32_t blocks = head_dim / kBlock;
    return blocks * kBlockUnits + (blocks + 1) / 2;
  }

  // The warp's channels are those of a block.
  __device__ static void store(Unit* row, uint32_t head_dim, uint32_t c, float x, uint32_t& beyond) {
    const uint32_t lane = threadIdx.x % kWarp, block = c / kBlock;
    float y = HalfRows::bounded(x, beyond);
#pragma unroll
    for (uint32_t apart = kBlock / 2; apart; apart /= 2) {
      const float other = __shfl_xor_sync(~0u, y, apart);
      y = lane & apart ? other - y : y + other;
    }
    y *= 0.125f;
    // The first of the numbers with the largest magnitude. If one is NaN, all are: each is a sum of all
    // channels.
    const float most = warp_max(fabsf(y));
    const uint32_t first = __ffs(static_cast<int>(__ballot_sync(~0u, fabsf(y) == most))) - 1;
    const float largest = __shfl_sync(~0u, y, first % kWarp);
    const __half half = __float2half_rn(most == 0 ? 0 : largest / kLowest);
    const float scale = __half2float(half), steps = scale < 0 || scale > 0 ? 1 / scale : 0;
    const float rounded = rintf(__fmul_rn(y, steps));
    const int code = static_cast<int>(rounded > kHighest ? kHighest : rounded >= kLowest ? rounded : kLowest);
    if constexpr (kBits == 8) {
      reinterpret_cast<int8_t*>(row)[c] = static_cast<int8_t>(code);
    } else {
      const int next = __shfl_down_sync(~0u, code, 1);
      if (c % 2 == 0)
        reinterpret_cast<uint8_t*>(row)[c / 2] = static_cast<uint8_t>((code + 8) | (next + 8) << 4);
    }
    __half* const scales = reinterpret_cast<__half*>(row + head_dim / kBlock * kBlockUnits);
    if (lane == 0) scales[block] = half;
    if (lane == 1 && block % 2 == 0 && (block + 1) * kBlock == head_dim) scales[block + 1] = __half(0.0f);
  }

  __device__ static float load(const Unit* row, uint32_t head_dim, uint32_t c) {
    float x[1];
    load_some(row, head_dim, c, x);
    return x[0];
  }
  __device__ static __half load_half(const Unit* row, uint32_t head_dim, uint32_t c) {
    return __float2half_rn(load(row, head_dim, c));
  }
  __device__ static float2 load_two(const Unit* row, uint32_t head_dim, uint32_t pair) {
    float x[2];
    load_some(row, head_dim, 2 * pair, x);
    return {x[0], x[1]};
  }
  __device__ static void load_four(const Unit* row, uint32_t head_dim, uint32_t c, float* x) {
    float four[4];
    load_some(row, head_dim, c, four);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) x[i] = four[i];
  }
  __device__ static void load_eight(const Unit* row, uint32_t head_dim, uint32_t i, float (&x)[8]) {
    load_some(row, head_dim, 8 * i, x);
  }
  __device__ static uint4 load_halves(const Unit* row, uint32_t head_dim, uint32_t i) {
    float x[8];
    load_eight(row, head_dim, i, x);
    return narrowed(x);
  }
  __device__ static float scale_of(const Unit* row, uint32_t head_dim, uint32_t block) {
    return __half2float(reinterpret_cast<const __half*>(row + head_dim / kBlock * kBlockUnits)[block]);
  }

 private:
  static constexpr uint32_t kOnes = 0x01010101, kFlip = 0xfefefefe;  // kFlip turns four ones into four -1
  // Which of four ones are -1 in H's row i, columns 4 * w to 4 * w + 3: those whose number has an odd number
  // of bits in common with i.
  __device__ static uint32_t flips(uint32_t i, uint32_t w) {
    return (i & 1 ? kFlip & 0xff00ff00 : 0) ^ (i & 2 ? kFlip & 0xffff0000 : 0) ^
           (__popc(i >> 2 & w) % 2 ? kFlip : 0);
  }
  __device__ static int dot(uint32_t codes, uint32_t row, int sum) {
    return __dp4a(static_cast<int>(codes), static_cast<int>(row), sum);
  }

  // Channels [c, c + kCount), where c is a multiple of kCount: 1, 2, 4, 8.
  template <uint32_t kCount>
  __device__ static void load_some(const Unit* row, uint32_t head_dim, uint32_t c, float (&x)[kCount]) {
    const uint32_t block = c / kBlock, in_block = c % kBlock;
    const Unit* const codes = row + block * kBlockUnits;
    int sums[kCount];
    // A word has 4 channels of 8 bits, or 8 channels of 4 bits: the low halves of its bytes have the even
    // ones. Codes of 4 bits are stored 8 larger, which adds up in channel 0 only.
    constexpr uint32_t kLow = kBits == 8 ? 0 : 1;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) sums[i] = kBits == 4 && in_block + i == 0 ? -8 * int(kBlock) : 0;
#pragma unroll
    for (uint32_t w = 0; w < kBlockUnits; ++w) {
      const uint32_t word = codes[w], of_first = flips(in_block >> kLow, w);
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) {
        const uint32_t signs = kOnes ^ of_first ^ flips(i >> kLow, w);
        if constexpr (kBits == 8) {
          sums[i] = dot(word, signs, sums[i]);
        } else {
          sums[i] = dot(word & 0x0f0f0f0f, signs, sums[i]);
          sums[i] = dot(word >> 4 & 0x0f0f0f0f, signs ^ ((in_block ^ i) & 1 ? kFlip : 0), sums[i]);
        }
      }
    }
    const float scale = scale_of(row, head_dim, block) / 4;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) x[i] = static_cast<float>(sums[i]) * scale;
  }
};

// Calls call(format) with the format of rows of a type, which is in the list of backends/kv_formats.h.
template <typename Call>
void with_format(DType type, const Call& call) {
#ifdef THIMBLE_TEST_FORMATS
  if (type == DType::kBF16) return call(BrainRows{});
#endif
  if (type == DType::kQ8_0) return call(BlockRows<8>{});
  if (type == DType::kQ4_0) return call(BlockRows<4>{});
  call(HalfRows{});
}
// Calls call(k, v) with the formats of keys and values.
template <typename Call>
void with_formats(DType k, DType v, const Call& call) {
#ifdef THIMBLE_TEST_FORMATS
  if (k == DType::kBF16) return call(BrainRows{}, BrainRows{});
#endif
  const auto with_value = [&](const auto& key) {
    if (v == DType::kQ8_0) return call(key, BlockRows<8>{});
    if (v == DType::kQ4_0) return call(key, BlockRows<4>{});
    call(key, HalfRows{});
  };
  if (k == DType::kQ8_0) return with_value(BlockRows<8>{});
  if (k == DType::kQ4_0) return with_value(BlockRows<4>{});
  with_value(HalfRows{});
}

}  // namespace thimble::cuda
