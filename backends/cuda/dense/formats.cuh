// The weight types as floats, eight neighbours of a row at a time. Device side. backends/cpu/isa/dequant.h
// defines the formats.
//
// In most formats eight elements are a byte, a nibble or a pair of bits in each of 8 neighbouring bytes, with
// one scale and one offset. Products of scales and integers are exact in f32, so a weight is rounded at most
// once, as on the CPU.
#pragma once

#include <cstddef>
#include <type_traits>

#include "backends/codebooks.h"
#include "backends/cuda/dense/codes.cuh"
#include "backends/cuda/kernel.cuh"
#include "base/dtype.h"

namespace thimble::cuda {

static __device__ const uint16_t kIq3SGrid[] = {THIMBLE_IQ3_S_GRID}, kIq3XxsGrid[] = {THIMBLE_IQ3_XXS_GRID},
                                 kIq2SGrid[] = {THIMBLE_IQ2_S_GRID}, kIq2XsGrid[] = {THIMBLE_IQ2_XS_GRID},
                                 kIq2XxsGrid[] = {THIMBLE_IQ2_XXS_GRID}, kIq1Grid[] = {THIMBLE_IQ1_GRID};

__device__ inline uint32_t byte_at(const std::byte* p) { return *reinterpret_cast<const uint8_t*>(p); }
// The address must be even.
__device__ inline uint32_t u16_at(const std::byte* p) { return *reinterpret_cast<const uint16_t*>(p); }
// The address must be a multiple of 4.
__device__ inline uint32_t u32_at(const std::byte* p) { return *reinterpret_cast<const uint32_t*>(p); }
__device__ inline float half_at(const std::byte* p) {
  return __half2float(*reinterpret_cast<const __half*>(p));
}
__device__ inline float2 halves(uint32_t bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// Loads 8 bytes. If their address is not a multiple of 4, it loads the aligned words around them. Each of
// those contains some of the 8 bytes, so none is outside of the matrix's memory.
__device__ inline uint2 eight_bytes(const std::byte* p) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t(3));
  const uint32_t shift = 8 * (address & 3), last = shift ? words[2] : 0;
  return {__funnelshift_r(words[0], words[1], shift), __funnelshift_r(words[1], last, shift)};
}
__device__ inline uint2 nibbles(uint2 bytes, bool high) {
  const uint32_t shift = high ? 4 : 0;
  return {bytes.x >> shift & 0x0f0f0f0f, bytes.y >> shift & 0x0f0f0f0f};
}
// Moves the low 4 bits of `bits` to bit 4 of 4 bytes.
__device__ inline uint32_t fifth_bits(uint32_t bits) {
  return (bits & 1) << 4 | (bits & 2) << 11 | (bits & 4) << 18 | (bits & 8) << 25;
}

// Eight elements: scale * q + offset, q in 0...255. The expression rounds once, so d * q - 8 d equals d * (q
// - 8) to the bit.
struct Eight {
  uint2 q;
  float scale, offset;

  // A byte in the last bits of 2^23 becomes a float without a conversion, of which older cards do only 16 per
  // clock.
  __device__ float at(uint32_t i) const {
    const uint32_t bits = __byte_perm(i < 4 ? q.x : q.y, 0x4b000000, 0x7540 | i % 4);
    return fmaf(scale, __uint_as_float(bits) - 0x1p23f, offset);
  }
};

// The scale and minimum of group g of 8, from the first 16 bytes of a q4_K or q5_K block: d, m, then 12 bytes
// of scales.
__device__ inline float2 group_scale(uint4 head, uint32_t g) {
  const uint32_t shift = 8 * (g % 4), a = head.y >> shift & 255, b = head.z >> shift & 255,
                 c = head.w >> shift & 255;
  const uint32_t scale = g < 4 ? a & 63 : (c & 15) | a >> 6 << 4,
                 least = g < 4 ? b & 63 : c >> 4 | b >> 6 << 4;
  const float2 d = halves(head.x);
  return {d.x * float(scale), d.y * float(least)};
}

// Eight elements as floats.
struct EightFloats {
  float v[8];
  __device__ float at(uint32_t i) const { return v[i]; }
};
__device__ inline EightFloats operator*(float scale, const EightFloats& e) {
  EightFloats scaled;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) scaled.v[i] = scale * e.v[i];
  return scaled;
}

// Selects from q2_K's 64 bytes of pairs of bits, which q3_K and tq2_0 also have. Each half of 128 elements
// has 32 bytes; byte j belongs to elements j, 32 + j, 64 + j, 96 + j.
__device__ inline uint2 pairs_of_bits(const std::byte* pairs, uint32_t i) {
  const uint2 bytes = eight_bytes(pairs + 32 * (i / 16) + 8 * (i % 4));
  const uint32_t shift = 2 * (i / 4 % 4);
  return {bytes.x >> shift & 0x03030303, bytes.y >> shift & 0x03030303};
}
// The four pairs of bits of a byte, as bytes.
__device__ inline uint32_t spread_pairs(uint32_t byte) {
  byte |= byte << 6;
  return (byte | byte << 12) & 0x03030303;
}
// Digit n of four bytes of tq1_0.
__device__ inline uint32_t digits(uint32_t bytes, uint32_t n) {
  constexpr uint32_t kPowers = 1 | 3 << 8 | 9 << 16 | 27 << 24;
  const uint32_t power = n < 4 ? kPowers >> 8 * n & 255 : 81;
  uint32_t all = 0;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) all |= ((bytes >> 8 * k) * power & 255) * 3 >> 8 << 8 * k;
  return all;
}
// Eight elements: scale * (q - 128), q in 0...255. There is no offset, because it would not be finite with a
// scale of 2^126.
struct EightAround128 {
  uint2 q;
  float scale;

  __device__ float at(uint32_t i) const {
    const uint32_t bits = __byte_perm(i < 4 ? q.x : q.y, 0x4b000000, 0x7540 | i % 4);
    return scale * (__uint_as_float(bits) - (0x1p23f + 128));
  }
};
// scale times the values of the low, or of the high, nibbles of eight bytes.
template <DType type>
__device__ inline EightAround128 values_of(uint2 bytes, bool high, float scale) {
  const uint2 a = code_bytes<type>(bytes.x), b = code_bytes<type>(bytes.y);
  return {{(high ? a.y : a.x) ^ 0x80808080, (high ? b.y : b.x) ^ 0x80808080}, scale};
}
// The values that eight indices of kBits bits select, negative where `signs` has a bit set.
template <uint32_t kBits, typename Value>
__device__ inline EightFloats signed_values(uint32_t places, const Value& value, uint32_t signs) {
  EightFloats e;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const float v = float(value(places >> kBits * i & ((1 << kBits) - 1)));
    e.v[i] = signs >> i & 1 ? -v : v;
  }
  return e;
}
__device__ inline uint32_t iq2_value(uint32_t place) { return 8 + 17 * place + (place >> 1); }  // 8, 25, 43
// -1, 0 or 1, with 1/8 added or subtracted.
__device__ inline EightFloats iq1_values(uint32_t places, bool less) {
  EightFloats e;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) e.v[i] = float(places >> 2 * i & 3) - (less ? 1.125f : 0.875f);
  return e;
}
// Eight sign bits from seven: the number of set bits is even.
__device__ inline uint32_t even_signs(uint32_t seven) { return seven | (__popc(seven) & 1) << 7; }
// Four times seven signs, and a scale in the top bits; the address is even.
__device__ inline uint32_t signs_word(const std::byte* p) { return u16_at(p) | u16_at(p + 2) << 16; }
// The scale of iq2_xs and iq2_s. The bytes of scales begin at `scales`; each nibble is for 16 elements.
__device__ inline float iq2_scale(const std::byte* b, uint32_t scales, uint32_t i) {
  return half_at(b) * (0.5f + float(byte_at(b + scales + i / 4) >> 4 * (i / 2 % 2) & 15)) * 0.25f;
}

// Elements [8 i, 8 i + 8) of block b.
template <DType type>
__device__ inline auto eight_of_block(const std::byte* b, uint32_t i) {
  if constexpr (type == DType::kQ8_0) {
    const uint2 q = eight_bytes(b + 2 + 8 * i);
    const float d = half_at(b);
    return Eight{{q.x ^ 0x80808080, q.y ^ 0x80808080}, d, -128 * d};
  } else if constexpr (type == DType::kQ4_0) {
    const float d = half_at(b);
    return Eight{nibbles(eight_bytes(b + 2 + 8 * (i & 1)), i & 2), d, -8 * d};
  } else if constexpr (type == DType::kQ4_1) {
    return Eight{nibbles(eight_bytes(b + 4 + 8 * (i & 1)), i & 2), half_at(b), half_at(b + 2)};
  } else if constexpr (type == DType::kQ5_0) {
    uint2 q = nibbles(eight_bytes(b + 6 + 8 * (i & 1)), i & 2);
    const uint32_t fifth = byte_at(b + 2 + i);
    const float d = half_at(b);
    return Eight{{q.x | fifth_bits(fifth), q.y | fifth_bits(fifth >> 4)}, d, -16 * d};
  } else if constexpr (type == DType::kQ5_1) {
    const uint2 q = nibbles(eight_bytes(b + 8 + 8 * (i & 1)), i & 2);
    const uint32_t fifth = byte_at(b + 4 + i);
    return Eight{{q.x | fifth_bits(fifth), q.y | fifth_bits(fifth >> 4)}, half_at(b), half_at(b + 2)};
  } else if constexpr (type == DType::kQ4_K) {
    const float2 s = group_scale(*reinterpret_cast<const uint4*>(b), i / 4);
    return Eight{nibbles(*reinterpret_cast<const uint2*>(b + 16 + 32 * (i / 8) + 8 * (i % 4)), i & 4), s.x,
                 -s.y};
  } else if constexpr (type == DType::kQ5_K) {
    const float2 s = group_scale(*reinterpret_cast<const uint4*>(b), i / 4);
    const uint2 q = nibbles(*reinterpret_cast<const uint2*>(b + 48 + 32 * (i / 8) + 8 * (i % 4)), i & 4);
    const uint2 fifth = *reinterpret_cast<const uint2*>(b + 16 + 8 * (i % 4));
    const uint32_t g = i / 4;
    return Eight{{q.x | (fifth.x >> g & 0x01010101) << 4, q.y | (fifth.y >> g & 0x01010101) << 4}, s.x, -s.y};
  } else if constexpr (type == DType::kQ6_K) {
    // Each half of the block has 4 quarters of 32 elements. Two quarters share 32 bytes of nibbles, all four
    // the 32 bytes of pairs of bits.
    const uint32_t half = i / 16, quarter = i / 4 % 4, j = 8 * (i % 4);
    const uint2 q = nibbles(eight_bytes(b + 64 * half + 32 * (quarter & 1) + j), quarter & 2);
    const uint2 high = eight_bytes(b + 128 + 32 * half + j);
    const float scale = half_at(b + 208) * float(static_cast<int8_t>(byte_at(b + 192 + i / 2)));
    const auto bits = [&](uint32_t pairs) { return (pairs >> 2 * quarter & 0x03030303) << 4; };
    return Eight{{q.x | bits(high.x), q.y | bits(high.y)}, scale, -32 * scale};
  } else if constexpr (type == DType::kQ2_K) {
    const uint32_t both = byte_at(b + i / 2);
    return Eight{pairs_of_bits(b + 16, i), half_at(b + 80) * float(both & 15),
                 -half_at(b + 82) * float(both >> 4)};
  } else if constexpr (type == DType::kQ3_K) {
    const uint32_t j = i / 2, group = i / 4;
    const uint32_t low = byte_at(b + 96 + j % 8) >> 4 * (j / 8) & 15,
                   high = byte_at(b + 104 + j % 4) >> 2 * (j / 4) & 3;
    const float scale = half_at(b + 108) * float(int32_t(low | high << 4) - 32);
    const uint2 q = pairs_of_bits(b + 32, i), third = eight_bytes(b + 8 * (i % 4));
    const auto bits = [&](uint32_t w) { return (w >> group & 0x01010101) << 2; };
    return Eight{{q.x | bits(third.x), q.y | bits(third.y)}, scale, -4 * scale};
  } else if constexpr (type == DType::kIQ4_NL) {
    return values_of<type>(eight_bytes(b + 2 + 8 * (i & 1)), i & 2, half_at(b));
  } else if constexpr (type == DType::kMXFP4) {
    return values_of<type>(eight_bytes(b + 1 + 8 * (i & 1)), i & 2, power_of_two(byte_at(b)));
  } else if constexpr (type == DType::kNVFP4) {
    return values_of<type>(eight_bytes(b + 4 + 8 * (i / 2)), i & 1, half_of_e4m3(byte_at(b + i / 2)));
  } else if constexpr (type == DType::kIQ4_XS) {
    const uint32_t head = u32_at(b), group = i / 4;
    const uint32_t scale = (u32_at(b + 4) >> 4 * group & 15) | (head >> (16 + 2 * group) & 3) << 4;
    return values_of<type>(eight_bytes(b + 8 + 16 * group + 8 * (i & 1)), i & 2,
                           half_at(b) * float(int32_t(scale) - 32));
  } else if constexpr (type == DType::kTQ2_0) {
    const float d = half_at(b + 64);
    return Eight{pairs_of_bits(b, i), d, -d};
  } else if constexpr (type == DType::kQ2_0) {
    const uint32_t pairs = u16_at(b + 2 + 2 * i);
    const float d = half_at(b);
    return Eight{{spread_pairs(pairs & 255), spread_pairs(pairs >> 8)}, d, -d};
  } else if constexpr (type == DType::kQ1_0) {  // bits as numbers 0 and 16
    const uint32_t bits = byte_at(b + 2 + i);
    const float d = half_at(b);
    return Eight{{fifth_bits(bits), fifth_bits(bits >> 4)}, d / 8, -d};
  } else if constexpr (type == DType::kTQ1_0) {
    // 32 bytes for elements below 160, 16 for those below 240, 4 for the rest, which each group of eight uses
    // twice.
    const uint32_t last = u16_at(b + 48) | u16_at(b + 50) << 16;
    const bool in_last = i >= 30;
    const uint2 w = in_last ? uint2{last, last} : eight_bytes(b + (i < 20 ? 8 * (i % 4) : 32 + 8 * (i % 2)));
    const uint32_t n = in_last ? 2 * (i - 30) : i < 20 ? i / 4 : (i - 20) / 2;
    const float d = half_at(b + 52);
    return Eight{{digits(w.x, n), digits(w.y, in_last ? n + 1 : n)}, d, -d};
  } else if constexpr (type == DType::kIQ3_S) {
    const uint32_t group = i / 4, ninths = byte_at(b + 66 + group) >> 2 * (i % 4);
    const auto entry = [&](uint32_t k) {
      return kIq3SGrid[byte_at(b + 2 + 2 * i + k) | (ninths >> k & 1) << 8];
    };
    const uint32_t scale = byte_at(b + 106 + group / 2) >> 4 * (group % 2) & 15;
    const float d = half_at(b) * float(2 * scale + 1);
    const auto value = [](uint32_t place) { return 2 * place + 1; };
    return d * signed_values<4>(entry(0) | entry(1) << 16, value, byte_at(b + 74 + i));
  } else if constexpr (type == DType::kIQ3_XXS) {
    const uint32_t w = signs_word(b + 66 + 4 * (i / 4));
    const uint32_t entries = kIq3XxsGrid[byte_at(b + 2 + 2 * i)] | kIq3XxsGrid[byte_at(b + 3 + 2 * i)] << 16;
    const float d = half_at(b) * (0.5f + float(w >> 28)) * 0.5f;
    const auto value = [](uint32_t place) { return 4 + 8 * place + place / 7 * 2; };  // 4, 12, ... 52, 62
    return d * signed_values<4>(entries, value, even_signs(w >> 7 * (i % 4) & 127));
  } else if constexpr (type == DType::kIQ2_XXS) {
    const std::byte* group = b + 2 + 8 * (i / 4);
    const uint32_t w = signs_word(group + 4);
    const float d = half_at(b) * (0.5f + float(w >> 28)) * 0.25f;
    return d * signed_values<2>(kIq2XxsGrid[byte_at(group + i % 4)], iq2_value,
                                even_signs(w >> 7 * (i % 4) & 127));
  } else if constexpr (type == DType::kIQ2_XS) {
    const uint32_t v = u16_at(b + 2 + 2 * i);
    return iq2_scale(b, 66, i) * signed_values<2>(kIq2XsGrid[v & 511], iq2_value, even_signs(v >> 9));
  } else if constexpr (type == DType::kIQ2_S) {
    const uint32_t entry = byte_at(b + 2 + i) | (byte_at(b + 66 + i / 4) >> 2 * (i % 4) & 3) << 8;
    return iq2_scale(b, 74, i) * signed_values<2>(kIq2SGrid[entry], iq2_value, byte_at(b + 34 + i));
  } else if constexpr (type == DType::kIQ1_S) {
    const uint32_t high = u16_at(b + 34 + 2 * (i / 4));
    const uint32_t entry = byte_at(b + 2 + i) | (high >> 3 * (i % 4) & 7) << 8;
    return half_at(b) * float(2 * (high >> 12 & 7) + 1) * iq1_values(kIq1Grid[entry], high >> 15);
  } else {
    static_assert(type == DType::kIQ1_M);
    const uint32_t high = byte_at(b + 32 + i / 2) >> 4 * (i % 2) & 15;
    const uint32_t d = u16_at(b + 48) >> 12 | u16_at(b + 50) >> 12 << 4 | u16_at(b + 52) >> 12 << 8 |
                       u16_at(b + 54) >> 12 << 12;
    const uint32_t scale = u16_at(b + 48 + 2 * (i / 8)) >> 3 * (i / 2 % 4) & 7;
    return __half2float(__ushort_as_half(static_cast<uint16_t>(d))) * float(2 * scale + 1) *
           iq1_values(kIq1Grid[byte_at(b + i) | (high & 7) << 8], high >> 3);
  }
}

__device__ inline float float_at(const float* p) { return *p; }
__device__ inline float float_at(const __half* p) { return __half2float(*p); }
__device__ inline float float_at(const __nv_bfloat16* p) { return __bfloat162float(*p); }

// Elements [e, e + 8) of a row of n elements; zeros from n on.
template <typename T>
__device__ inline EightFloats eight_of_floats(const T* row, uint32_t e, uint32_t n) {
  EightFloats v;
  if (e + 8 <= n && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
    struct alignas(16) {
      T at[8];
    } wide;
#pragma unroll
    for (uint32_t i = 0; i < sizeof wide / 16; ++i)
      reinterpret_cast<uint4*>(&wide)[i] = reinterpret_cast<const uint4*>(row + e)[i];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v.v[i] = float_at(&wide.at[i]);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v.v[i] = e + i < n ? float_at(row + e + i) : 0;
  }
  return v;
}

// Elements [e, e + 8) of a row of n elements of any type; e is a multiple of 8. For types without blocks,
// zeros from n on.
template <DType type>
__device__ inline auto eight_of_row(const std::byte* row, uint32_t e, uint32_t n) {
  if constexpr (type == DType::kF32) {
    return eight_of_floats(reinterpret_cast<const float*>(row), e, n);
  } else if constexpr (type == DType::kF16) {
    return eight_of_floats(reinterpret_cast<const __half*>(row), e, n);
  } else if constexpr (type == DType::kBF16) {
    return eight_of_floats(reinterpret_cast<const __nv_bfloat16*>(row), e, n);
  } else {
    using Block = BlockOf<type>;
    return eight_of_block<type>(row + uint64_t(e / Block::kBlock) * Block::kBytes, e % Block::kBlock / 8);
  }
}

// Two f16, rounded to nearest even; values that are too large become 65504.
__device__ inline uint32_t pack(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Eight elements as operands of tensor cores.
template <typename Elements>
__device__ inline uint4 as_f16(const Elements& e) {
  return {pack(e.at(0), e.at(1)), pack(e.at(2), e.at(3)), pack(e.at(4), e.at(5)), pack(e.at(6), e.at(7))};
}

// Calls each(type) with a type that is known only when a program is recorded, as a compile-time constant.
// Host side.
template <typename Each>
auto of_type(DType type, const Each& each) {
  switch (type) {
#define X(name, number, block, bytes) \
  case DType::k##name:                \
    return each(std::integral_constant<DType, DType::k##name>());
    THIMBLE_DTYPES(X)
#undef X
  }
  return decltype(each(std::integral_constant<DType, DType::kF32>()))();
}

}  // namespace thimble::cuda
