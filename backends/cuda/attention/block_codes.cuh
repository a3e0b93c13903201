// What the kernels of decode attention to blocks share: H as an operand of matrix units, and the combination
// of warps, whose sums of values H still has to multiply. Device side.
//
// Fragments of a matrix instruction: lane 4 g + t has row or column g and elements 2 t and 2 t + 1 of each 8.
#pragma once

#include "backends/cuda/attention/pool_parts.cuh"

namespace thimble::cuda {

// Weights are up to 2^12, so that those of long texts are not below the range of f16.
inline constexpr float kWeightBits = 12;

template <typename Format>
inline constexpr uint32_t kBitsOf = 16;
template <uint32_t kBits>
inline constexpr uint32_t kBitsOf<BlockRows<kBits>> = kBits;

__device__ inline uint32_t pair_of(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline __half2 as_pair(uint32_t bits) { return reinterpret_cast<const __half2&>(bits); }
__device__ inline uint32_t bits_of(__half2 pair) { return reinterpret_cast<const uint32_t&>(pair); }

// {high, low} of two numbers as f16.
struct Split {
  uint32_t high, low;
  __device__ Split(float x, float y) {
    const __half2 top = __floats2half2_rn(x, y);
    const float2 of_top = __half22float2(top);
    high = bits_of(top);
    low = pair_of(x - of_top.x, y - of_top.y);
  }
};

// The rows of H for two words of codes of a block, which a lane multiplies: words t and t + 4 of 8 bits; the
// even and the odd channels of word t of 4 bits. Matrix i has the sums of channels 8 i to 8 i + 7.
template <uint32_t kBits>
struct HadamardColumns {
  uint32_t of[4][2];

  // An element is -1 if the numbers of its row and its column have an odd number of bits in common. Here the
  // column is 8 i + g, and the row has the bits of a byte's place in its word, of t, and of the word.
  __device__ HadamardColumns() {
    const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    constexpr uint32_t kOnes = 0x01010101, kFlip = 0xfefefefe;
    const uint32_t of_byte = kBits == 8 ? g : g >> 1;
    const uint32_t base =
        kOnes ^ (of_byte & 1 ? kFlip & 0xff00ff00 : 0) ^ (of_byte & 2 ? kFlip & 0xffff0000 : 0);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t of_t = kBits == 8 ? g >> 2 | (i & 1) << 1 : i, of_word = kBits == 8 ? i >> 1 : g & 1;
      of[i][0] = base ^ (__popc(of_t & t) % 2 ? kFlip : 0);
      of[i][1] = of[i][0] ^ (of_word ? kFlip : 0);
    }
  }
};
template <>
struct HadamardColumns<16> {};

// c[16][8] = first + a[16][32] b[32][8]; `first` is an integer for each element of c.
template <uint32_t kBits>
__device__ inline void multiply_codes(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                      int32_t first, int32_t others) {
  if constexpr (kBits == 8)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, "
        "%11, %10, %11};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(first), "r"(others));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, "
        "%11, %10, %11};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(first), "r"(others));
}
// Sums of codes begin with the bits of kMagic, so that their own bits are those of kMagic plus a quarter of
// the sum. A scale has 11 bits, so its product with kMagic is exact.
inline constexpr float kMagic = 0x1.8p21f;
// What the first sum of a lane begins with. Codes of 4 bits are stored 8 larger, which adds up in channel 0
// only.
template <uint32_t kBits>
__device__ inline int32_t first_sum(uint32_t tile) {
  return __float_as_int(kMagic) - (kBits == 4 && tile == 0 && threadIdx.x % 4 == 0 ? 8 * 32 : 0);
}

// Combines the results of the block's warps, in order, and stores them as the parts part_of(query head). A
// warp's sums of values are [heads][kDim] floats, `stride` bytes after those of the warp before it. A warp
// without rows has a peak of -inf. `threads` threads call this, whole warps, after all stored theirs.
template <bool kOfBlocks, uint32_t kDim, uint32_t kMostWarps, uint32_t kHeads, typename PartOf>
__device__ inline void combine_warps(const float2 (&peaks_and_sums)[kMostWarps][kHeads], uint32_t warps,
                                     const std::byte* outs, uint32_t stride, uint32_t heads, uint32_t thread,
                                     uint32_t threads, const Parts& parts, const PartOf& part_of) {
  constexpr uint32_t kFours = kDim / 4;
  const uint32_t lane = thread % kWarp;
  for (uint32_t from = 0; from < heads * kFours; from += threads) {
    const uint32_t i = from + thread, h = min(i / kFours, heads - 1), four = i % kFours;
    float2 of_warp[kMostWarps];
#pragma unroll
    for (uint32_t w = 0; w < kMostWarps; ++w)
      of_warp[w] = w < warps ? peaks_and_sums[w][h] : float2{-kInfinity, 0};
    float factors[kMostWarps];
    const float2 of_all = weigh(of_warp, factors);
    float total[4] = {};
#pragma unroll
    for (uint32_t w = 0; w < kMostWarps; ++w) {
      if (factors[w] == 0) continue;
      const float4 x = reinterpret_cast<const float4*>(outs + w * stride)[h * kFours + four];
      total[0] += x.x * factors[w];
      total[1] += x.y * factors[w];
      total[2] += x.z * factors[w];
      total[3] += x.w * factors[w];
    }
    if constexpr (kOfBlocks) {  // a block is in 8 neighbouring lanes
#pragma unroll
      for (uint32_t apart = 1; apart < 4; apart *= 2)
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c)
          if (!(c & apart)) {
            const float a = total[c], b = total[c | apart];
            total[c] = a + b;
            total[c | apart] = a - b;
          }
#pragma unroll
      for (uint32_t apart = 1; apart < 8; apart *= 2)
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c) {
          const float other = __shfl_xor_sync(~0u, total[c], apart);
          total[c] = lane & apart ? other - total[c] : total[c] + other;
        }
#pragma unroll
      for (float& x : total) x *= 0.25f;
    }
    if (i >= heads * kFours) continue;
    const uint64_t part = part_of(h);
    reinterpret_cast<float4*>(parts.out + part * kDim)[four] = {total[0], total[1], total[2], total[3]};
    if (four == 0) parts.peak_and_sum[part] = of_all;
  }
}

}  // namespace thimble::cuda
