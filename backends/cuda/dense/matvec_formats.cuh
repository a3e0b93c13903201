// The weight types of base/dtype.h as matvec.cu multiplies them: eight rows in shared memory and a strip of x
// in registers. Block formats: backends/cpu/isa/dequant.h.
//
// Quantised weights stay integers. The 256 columns of a strip of x share a unit, a power of two. In this unit
// each x is a 31-bit integer, written as four signed bytes, its digits in base 256, so tensor cores multiply
// x and weights exactly. Rows 0 to 7 of an instruction hold the low halves of the packed bytes of eight
// weight rows, rows 8 to 15 the high halves. Even columns hold the digits of the x of the low halves, odd
// columns those of the high halves. Lane 4 row + part thus gets digit `part` of low times low in c[0] and of
// high times high in c[3]. A q4_K weight takes about two instructions this way. Loading it from an H200's
// memory takes the time of 3.9 instructions. Dequantising to f32 first takes three or more, many of them in
// the integer unit, which has half the rate.
#pragma once

#include <cstddef>

#include "backends/cuda/dense/codes.cuh"
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/mma_int8.cuh"
#include "backends/cuda/shared_memory.cuh"
#include "base/dtype.h"

namespace thimble::cuda::matvec {

extern __shared__ __align__(16) std::byte shared[];

__device__ inline uint32_t byte_of(uint32_t word, uint32_t i) { return __byte_perm(word, 0, 0x4440 + i); }

__device__ inline float2 halves_of(uint32_t word) {
  return __half22float2(__halves2half2(__ushort_as_half(word & 0xffff), __ushort_as_half(word >> 16)));
}

// Four lanes share a row of weights; lane 4 row + part.
struct Lane {
  uint32_t row, part;
};

// Reads consecutive words from an address that is a multiple of kAlign.
template <uint32_t kAlign>
class Words {
 public:
  __device__ explicit Words(uint32_t address)
      : words_(kAlign < 4 ? address & ~3u : address), shift_(address * 8) {}
  __device__ uint32_t operator[](uint32_t i) const {
    const uint32_t word = load_word(words_ + 4 * i);
    return kAlign < 4 ? __funnelshift_r(word, load_word(words_ + 4 * i + 4), shift_) : word;
  }

 private:
  uint32_t words_;
  uint32_t shift_;  // bit offset in an aligned word at which they begin; a funnel shift takes it modulo 32
};

// Columns that a warp processes at once; fewer for plain types, as many as 256 bytes hold.
constexpr uint32_t kStripColumns = 256;
__host__ __device__ constexpr uint32_t strip_columns(uint32_t block, uint32_t block_bytes) {
  return block == 1 ? 256 / block_bytes : kStripColumns;
}

// x[first] to x[first + 3]; zeros from x[n] on.
__device__ inline float4 quad_of(const float* x, uint32_t first, uint32_t n) {
  if (first + 4 <= n && reinterpret_cast<uintptr_t>(x) % 16 == 0)
    return *reinterpret_cast<const float4*>(x + first);
  return {first < n ? x[first] : 0, first + 1 < n ? x[first + 1] : 0, first + 2 < n ? x[first + 2] : 0,
          first + 3 < n ? x[first + 3] : 0};
}

// A lane's part of a strip of x: 4 * kQuads consecutive columns.
template <uint32_t kQuads>
struct StripOf {
  static constexpr uint32_t kColumns = 4 * kQuads * kWarp;
  float4 quads[kQuads];

  // Loads columns of the strip that begins at x; zeros from column n on.
  __device__ static StripOf load(const float* x, uint32_t n) {
    StripOf strip;
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) strip.quads[i] = quad_of(x, column(i), n);
    return strip;
  }
  __device__ void store(float* x, uint32_t n) const {
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) {
      const float4 q = quads[i];
      if (column(i) < n) x[column(i)] = q.x;
      if (column(i) + 1 < n) x[column(i) + 1] = q.y;
      if (column(i) + 2 < n) x[column(i) + 2] = q.z;
      if (column(i) + 3 < n) x[column(i) + 3] = q.w;
    }
  }
  // Stores it in shared memory, 16 bytes per quad and lane.
  __device__ void put(uint32_t memory) const {
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i)
      store_words(memory + place(i), {__float_as_uint(quads[i].x), __float_as_uint(quads[i].y),
                                      __float_as_uint(quads[i].z), __float_as_uint(quads[i].w)});
  }
  __device__ static StripOf get(uint32_t memory) {
    StripOf strip;
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) {
      const uint4 q = load_words(memory + place(i));
      strip.quads[i] = {__uint_as_float(q.x), __uint_as_float(q.y), __uint_as_float(q.z),
                        __uint_as_float(q.w)};
    }
    return strip;
  }
  __device__ float sum_of_squares() const {
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) {
      const float4 q = quads[i];
      sum += q.x * q.x + q.y * q.y + (q.z * q.z + q.w * q.w);
    }
    return sum;
  }
  __device__ StripOf scaled(float scale) const {
    StripOf y;
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i)
      y.quads[i] = {quads[i].x * scale, quads[i].y * scale, quads[i].z * scale, quads[i].w * scale};
    return y;
  }
  // Returns this * scale * w.
  __device__ StripOf scaled(float scale, const StripOf& w) const {
    StripOf y;
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i)
      y.quads[i] = {quads[i].x * scale * w.quads[i].x, quads[i].y * scale * w.quads[i].y,
                    quads[i].z * scale * w.quads[i].z, quads[i].w * scale * w.quads[i].w};
    return y;
  }

 private:
  __device__ static uint32_t column(uint32_t i) { return 4 * (kQuads * (threadIdx.x % kWarp) + i); }
  __device__ static uint32_t place(uint32_t i) { return 16 * (kWarp * i + threadIdx.x % kWarp); }
};

// The digits of four integers of +-2^30: digit d of all four in word d. Adding 128 to each lower byte carries
// into the next byte if a digit becomes negative; flipping its top bit subtracts the 128 again.
__device__ inline uint4 digits_of(const int32_t (&v)[4]) {
  uint32_t d[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) d[i] = (static_cast<uint32_t>(v[i]) + 0x00808080) ^ 0x00808080;
  const uint32_t low01 = __byte_perm(d[0], d[1], 0x5140), low23 = __byte_perm(d[2], d[3], 0x5140),
                 high01 = __byte_perm(d[0], d[1], 0x7362), high23 = __byte_perm(d[2], d[3], 0x7362);
  return {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
          __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
}

// A strip of x for quantised weights.
struct Digits {
  using Strip = StripOf<2>;

  uint32_t words[8];  // for the instructions' columns of lane.row: digit row / 2 of four columns each
  float unit;         // of digit `part`
  float sums[2];      // sums of the 32 columns from 32 part and from 128 + 32 part on

  // All lanes of a warp call this together. `stage` is the warp's 1 KiB of shared memory. Word i belongs to
  // four columns: those from 4 part + word(i) on for low halves, and kHigh after these for high halves.
  // Formats with kPairs multiply the two halves of a byte one after the other: two of the four columns and
  // the two that are kHigh after them, first for the first two bytes.
  template <typename Format>
  __device__ void take(const Strip& x, uint32_t stage, Lane lane) {
    const uint32_t thread = 4 * lane.row + lane.part;
    const float4 a = x.quads[0], b = x.quads[1];
    const auto larger = [](uint32_t bits, float f) {
      return max(bits, __float_as_uint(fabsf(f)));
    };  // NaN is the largest
    const uint32_t bits = max(larger(larger(larger(larger(0, a.x), a.y), a.z), a.w),
                              larger(larger(larger(larger(0, b.x), b.y), b.z), b.w));
    // All are below 2^(exponent - 126), so after scaling by 2^(156 - exponent) they are below 2^30.
    const uint32_t exponent = max(__reduce_max_sync(~0u, bits) >> 23, 32u);
    const float scale = __uint_as_float((283 - exponent) << 23);
    // Infinity and NaN have no digits; their products are NaN.
    unit = Format::kFactor *
           __uint_as_float(exponent == 255 ? 0x7fc00000 : (exponent - 29 + 8 * lane.part) << 23);

    const int32_t first[4] = {__float2int_rn(a.x * scale), __float2int_rn(a.y * scale),
                              __float2int_rn(a.z * scale), __float2int_rn(a.w * scale)};
    const int32_t second[4] = {__float2int_rn(b.x * scale), __float2int_rn(b.y * scale),
                               __float2int_rn(b.z * scale), __float2int_rn(b.w * scale)};
    const uint4 c = digits_of(first), d = digits_of(second);
    store_words(stage + 32 * thread, {c.x, d.x, c.y, d.y});
    store_words(stage + 32 * thread + 16, {c.z, d.z, c.w, d.w});
    __syncwarp();
    if constexpr (requires { Format::kPairs; }) {
      const uint32_t low = stage + lane.part / 2 * 32 + lane.row / 2 * 8 + lane.part % 2 * 4;
      const uint32_t pairs = lane.row % 2 ? 0x7362 : 0x5140;
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i)
        words[i] = __byte_perm(load_word(low + 4 * Format::word(i)),
                               load_word(low + 4 * (Format::word(i) + Format::kHigh)), pairs);
    } else {
      const uint32_t digit = stage + lane.row % 2 * (4 * Format::kHigh) + lane.part / 2 * 32 +
                             lane.row / 2 * 8 + lane.part % 2 * 4;
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) words[i] = load_word(digit + 4 * Format::word(i));
    }

    float sum = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    sums[0] = __shfl_sync(~0u, sum, 4 * lane.part);
    sums[1] = __shfl_sync(~0u, sum, 4 * lane.part + 16);
  }
};

// q4_K, q5_K. The low halves are a group of 32, the high halves the next group.
template <DType kOf>
struct GroupsOf32 {
  using Columns = Digits;
  static constexpr DType kType = kOf;
  static constexpr bool kFifthBits = kOf == DType::kQ5_K;
  static constexpr uint32_t kBlock = 256, kBytes = kFifthBits ? 176 : 144, kColumns = 256, kHigh = 32;
  static constexpr float kFactor = kFifthBits ? 1 : 1 / 16.0f;
  static __device__ constexpr uint32_t word(uint32_t i) { return 64 * (i / 2) + 16 * (i % 2); }

  static __device__ float multiply(uint32_t row, const Digits& x, Lane lane) {
    const uint4 head = load_words(row);  // d and m; scales; minima; the remaining bits of both
    const uint32_t scales[2] = {head.y & 0x3f3f3f3f, (head.w & 0x0f0f0f0f) | (head.y >> 2 & 0x30303030)};
    const uint32_t mins[2] = {head.z & 0x3f3f3f3f, (head.w >> 4 & 0x0f0f0f0f) | (head.z >> 2 & 0x30303030)};
    const Words<4> fifth(row + 16 + 4 * lane.part), words(row + kBytes - 128 + 4 * lane.part);
    int32_t low_sum = 0, high_sum = 0;
#pragma unroll
    for (uint32_t pair = 0; pair < 4; ++pair) {
      const uint32_t w[2] = {words[8 * pair], words[8 * pair + 4]};
      const int32_t low_scale = byte_of(scales[pair / 2], pair % 2 * 2),
                    high_scale = byte_of(scales[pair / 2], pair % 2 * 2 + 1);
      int32_t c[4];
      if constexpr (kFifthBits) {
        uint32_t low[2], high[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {  // bits 2 pair and 2 pair + 1 move to bit 4
          const uint32_t f = fifth[4 * i];
          low[i] =
              (w[i] & 0x0f0f0f0f) | ((pair < 2 ? f << (4 - 2 * pair) : f >> (2 * pair - 4)) & 0x10101010);
          high[i] = (w[i] >> 4 & 0x0f0f0f0f) |
                    ((pair < 2 ? f << (3 - 2 * pair) : f >> (2 * pair - 3)) & 0x10101010);
        }
        multiply_bytes<false>(c, low[0], high[0], low[1], high[1], x.words[2 * pair], x.words[2 * pair + 1]);
        high_sum += high_scale * c[3];
      } else {
        // The high halves are used in place, 16 times as large. The low halves in the same bytes add low
        // times high, which is c[1].
        multiply_bytes<false>(c, w[0] & 0x0f0f0f0f, w[0], w[1] & 0x0f0f0f0f, w[1], x.words[2 * pair],
                              x.words[2 * pair + 1]);
        high_sum += high_scale * (c[3] - c[1]);
      }
      low_sum += low_scale * c[0];
    }
    // At most 8 * 63 * 32 * 240 * 128 < 2^29.
    const float sum = static_cast<float>((kFifthBits ? 1 : 16) * low_sum + high_sum);
    // A lane adds the minima of groups part and part + 4.
    const float offset = fmaf(byte_of(mins[0], lane.part), x.sums[0],
                              static_cast<float>(byte_of(mins[1], lane.part)) * x.sums[1]);
    const float2 d = halves_of(head.x);
    return d.x * x.unit * sum - d.y * offset;
  }
};

// q6_K. An instruction multiplies 16 low halves, which are one group, and the 16 high halves of the same
// bytes, which are four groups later.
struct GroupsOf16 {
  using Columns = Digits;
  static constexpr DType kType = DType::kQ6_K;
  static constexpr uint32_t kBlock = 256, kBytes = 210, kColumns = 256, kHigh = 64;
  static constexpr float kFactor = 1 / 4.0f;
  static __device__ constexpr uint32_t word(uint32_t i) { return 128 * (i / 4) + 16 * (i % 4); }

  // 4 (q - 32) as a signed byte: the six bits at the top, the highest inverted. `four` is in bits 2 to 5,
  // `two` in bits 6 and 7.
  static __device__ uint32_t join(uint32_t four, uint32_t two) {
    return (four & 0x3c3c3c3c) | (two & 0xc0c0c0c0);
  }

  static __device__ float multiply(uint32_t row, const Digits& x, Lane lane) {
    const Words<2> words(row + 4 * lane.part), scale_words(row + 192);
    int32_t low_sum = 0, high_sum = 0;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t low_scales = scale_words[2 * half], high_scales = scale_words[2 * half + 1];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t top = words[32 + 8 * half + 4 * i] ^ 0xaaaaaaaa;
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
          const uint32_t four = words[16 * half + 8 * j + 4 * i];
          int32_t c[4];
          multiply_bytes<true>(c, join(four << 2, top << (6 - 2 * j)), join(four >> 2, top << (2 - 2 * j)),
                               x.words[4 * half + 2 * j + i]);
          low_sum += signed_byte_of(low_scales, 2 * j + i) * c[0];
          high_sum += signed_byte_of(high_scales, 2 * j + i) * c[3];
        }
      }
    }
    // At most 128 * 16 * 16 * 128 * 128 = 2^29.
    return load_half(row + 208) * x.unit * static_cast<float>(low_sum + high_sum);
  }
};

// Blocks of 32 with one scale take one instruction each; elements 0 to 15 are its low half, 16 to 31 its high
// half.
template <DType kOf>
struct BlocksOf32 {  // q4_0, q4_1, q5_0, q5_1
  using Columns = Digits;
  static constexpr DType kType = kOf;
  static constexpr bool kMin = kOf == DType::kQ4_1 || kOf == DType::kQ5_1;
  static constexpr bool kFifthBits = kOf == DType::kQ5_0 || kOf == DType::kQ5_1;
  static constexpr uint32_t kHead = kMin ? 4 : 2, kPacked = kHead + (kFifthBits ? 4 : 0);
  static constexpr uint32_t kBlock = 32, kBytes = kPacked + 16, kColumns = 256, kHigh = 16;
  static constexpr uint32_t kAlign = kMin ? 4 : 2;
  static constexpr float kFactor = kFifthBits ? 1 : 1 / 16.0f;
  static __device__ constexpr uint32_t word(uint32_t i) { return 32 * i; }

  // Moves bits 0 to 3 to bit 4 of four bytes.
  static __device__ uint32_t spread(uint32_t bits) { return (bits & 15) * 0x02040810u & 0x10101010; }

  static __device__ float multiply(uint32_t row, const Digits& x, Lane lane) {
    float dot = 0, offset = 0;
#pragma unroll
    for (uint32_t b = 0; b < 8; ++b) {
      const uint32_t block = row + b * kBytes, w = Words<kAlign>(block + kPacked + 4 * lane.part)[0];
      uint32_t low = w & 0x0f0f0f0f, high = w & 0xf0f0f0f0;
      if constexpr (kFifthBits) {
        const uint32_t fifth = Words<kAlign>(block + kHead)[0] >> (4 * lane.part);
        low |= spread(fifth);
        high = high >> 4 | spread(fifth >> 16);
      }
      int32_t c[4];
      multiply_bytes<false>(c, low, high, x.words[b]);
      // Below 2 * 16 * 240 * 128 < 2^20.
      dot = fmaf(load_half(block), static_cast<float>((kFifthBits ? 1 : 16) * c[0] + c[3]), dot);
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {  // a lane adds the minima of blocks part and part + 4
      const uint32_t block = row + (lane.part + 4 * i) * kBytes;
      offset =
          fmaf(kMin ? -load_half(block + 2) : (kFifthBits ? 16 : 8) * load_half(block), x.sums[i], offset);
    }
    return dot * x.unit - offset;
  }
};

// iq4_nl, mxfp4: blocks of 32 with a scale; nibbles index a table of signed bytes.
template <DType kOf>
struct Codes {
  using Columns = Digits;
  static constexpr DType kType = kOf;
  static constexpr bool kPairs = true, kPowers = kOf == DType::kMXFP4;
  static constexpr uint32_t kHead = kPowers ? 1 : 2;
  static constexpr uint32_t kBlock = 32, kBytes = kHead + 16, kColumns = 256, kHigh = 16;
  static constexpr float kFactor = kPowers ? 0.5f : 1;
  static __device__ constexpr uint32_t word(uint32_t i) { return 32 * i; }

  // A block's scale divided by kFactor. For mxfp4 it is 2^(x - 128): the number with exponent x; 0 for x = 0,
  // where it would be subnormal. x = 255, which the format defines as NaN, gives infinity.
  static __device__ float scale_at(uint32_t block) {
    if constexpr (kPowers)
      return __uint_as_float(load_byte(block) << 23);
    else
      return load_half(block);
  }
  static __device__ float multiply(uint32_t row, const Digits& x, Lane lane) {
    constexpr uint32_t kPeriod = kHead % 2 ? 4 : 2;  // blocks after which the alignment of words repeats
    float dot = 0;
#pragma unroll
    for (uint32_t first = 0; first < kPeriod; ++first) {
      const Words<kHead> words(row + first * kBytes + kHead + 4 * lane.part);
#pragma unroll
      for (uint32_t b = first; b < 8; b += kPeriod) {
        const uint32_t nibbles = words[(b - first) * kBytes / 4];
        int32_t c[4];
        if constexpr (kPowers) {
          const auto [twice, minus] = addends_of_fp4(nibbles);
          multiply_bytes<true>(c, twice.x, twice.y, minus.x, minus.y, x.words[b], x.words[b]);
        } else {
          const uint2 values = pairs_of_codes<kOf>(nibbles);
          multiply_bytes<true>(c, values.x, values.y, x.words[b]);
        }
        dot = fmaf(scale_at(row + b * kBytes), static_cast<float>(c[0] + c[3]), dot);  // at most 2^19
      }
    }
    return dot * x.unit;
  }
};

// iq4_xs: eight such groups of 32, with a scale of six bits each.
struct CodesInGroups {
  using Columns = Digits;
  static constexpr DType kType = DType::kIQ4_XS;
  static constexpr bool kPairs = true;
  static constexpr uint32_t kBlock = 256, kBytes = 136, kColumns = 256, kHigh = 16;
  static constexpr float kFactor = 1;
  static __device__ constexpr uint32_t word(uint32_t i) { return 32 * i; }

  static __device__ float multiply(uint32_t row, const Digits& x, Lane lane) {
    const Words<4> head(row), words(row + 8 + 4 * lane.part);
    const uint32_t low = head[1], high = head[0] >> 16;
    int32_t sum = 0;  // at most 8 * 32 * 2^19
#pragma unroll
    for (uint32_t b = 0; b < 8; ++b) {
      const uint2 values = pairs_of_codes<kType>(words[4 * b]);
      int32_t c[4];
      multiply_bytes<true>(c, values.x, values.y, x.words[b]);
      sum += (static_cast<int32_t>((low >> 4 * b & 15) | (high >> 2 * b & 3) << 4) - 32) * (c[0] + c[3]);
    }
    return load_half(row) * x.unit * static_cast<float>(sum);
  }
};

struct Bytes {  // q8_0
  using Columns = Digits;
  static constexpr DType kType = DType::kQ8_0;
  static constexpr uint32_t kBlock = 32, kBytes = 34, kColumns = 256, kHigh = 16;
  static constexpr float kFactor = 1;
  static __device__ constexpr uint32_t word(uint32_t i) { return 32 * i; }

  static __device__ float multiply(uint32_t row, const Digits& x, Lane lane) {
    float dot = 0;
#pragma unroll
    for (uint32_t b = 0; b < 8; ++b) {
      const Words<2> words(row + b * kBytes + 2 + 4 * lane.part);
      int32_t c[4];
      multiply_bytes<true>(c, words[0], words[4], x.words[b]);
      dot = fmaf(load_half(row + b * kBytes), static_cast<float>(c[0] + c[3]), dot);  // at most 2^19
    }
    return dot * x.unit;
  }
};

// For plain types, a strip of x stays in shared memory.
struct Floats {
  using Strip = StripOf<1>;

  uint32_t stage;

  template <typename Format>
  __device__ void take(const Strip& x, uint32_t memory, Lane) {
    stage = memory;
    x.put(stage);
    __syncwarp();
  }
};

// f32, f16, bf16: multiplied in f32, one word at a time.
template <DType kOf>
struct Plain {
  static constexpr DType kType = kOf;
  static constexpr uint32_t kBlock = 1, kBytes = kType == DType::kF32 ? 4 : 2, kColumns = 256 / kBytes;
  using Columns = Floats;

  static __device__ float multiply(uint32_t row, const Floats& x, Lane lane) {
    constexpr uint32_t kPerWord = 4 / kBytes;
    const Words<kBytes> words(row + 4 * lane.part);
    const uint32_t first = x.stage + 4 * kPerWord * lane.part;
    float dot = 0;
#pragma unroll
    for (uint32_t i = 0; i < kColumns / kPerWord; i += 4) {
      const uint32_t word = words[i];
      if constexpr (kType == DType::kF32) {
        dot = fmaf(__uint_as_float(word), load_float(first + 4 * i), dot);
      } else {
        float2 w;
        if constexpr (kType == DType::kF16)
          w = halves_of(word);
        else
          w = {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
        dot = fmaf(w.y, load_float(first + 8 * i + 4), fmaf(w.x, load_float(first + 8 * i), dot));
      }
    }
    return dot;
  }
};

// How eight rows of a strip pass through shared memory: in pieces of 16 bytes, which lanes copy in turns, so
// that they read as many neighbouring bytes as possible.
constexpr uint32_t kRingBytes = 5760;  // per warp
template <typename Format>
struct RingOf {
  static constexpr uint32_t kLowestBit = Format::kBytes & (0 - Format::kBytes);
  static constexpr uint32_t kAlign =
      kLowestBit < 16 ? kLowestBit : 16;  // alignment of blocks in bytes; tensors begin at multiples of 16
  static constexpr uint32_t kBytes = Format::kColumns / Format::kBlock * Format::kBytes;  // per row
  // From the multiple of 16 before a row's first byte to the one after its last.
  static constexpr uint32_t kPieces = (16 - kAlign + kBytes + 15) / 16;
  static constexpr uint32_t kRowPieces =
      kPieces | 1;  // odd, so that the same 16 bytes of eight rows use all 32 banks
  static constexpr uint32_t kStride = 16 * kRowPieces, kSlotBytes = 8 * kStride;
  static constexpr uint32_t kSlots = kRingBytes / kSlotBytes;
  static constexpr uint32_t kCopies = (8 * kRowPieces + kWarp - 1) / kWarp;
  static_assert(kSlots >= 2 && kCopies <= 6);
};

}  // namespace thimble::cuda::matvec
