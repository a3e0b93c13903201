// The block formats of base/dtype.h as floats: one function a type, the definition that other backends
// follow.
//
// A block's bytes, little-endian: its scales first, then packed integers. d and m are halves. In the 4 and 5
// bit types of 32 elements the low halves of 16 bytes are elements 0 to 15, the high halves 16 to 31.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "backends/cpu/isa/vector.h"
#include "base/dtype.h"

namespace thimble::cpu {
namespace {

inline uint32_t byte_at(const std::byte* p) { return static_cast<uint8_t>(*p); }
inline uint32_t u16_at(const std::byte* p) {
  uint16_t v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline uint32_t u32_at(const std::byte* p) {
  uint32_t v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

inline float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// As in base/bits.h, without a branch so that loops over it become vectors.
inline float half_to_float(uint32_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0;  // infinity, NaN
  const float finite = from_bits(magnitude << 13) * 0x1p112f;
  return from_bits(__builtin_bit_cast(uint32_t, finite) | special | sign);
}

// A block's scale; where there is an instruction for it, that takes a third off the time of a q8_0 dot.
inline float scale_at(const std::byte* p) {
#if defined(__F16C__)
  return _cvtsh_ss(static_cast<uint16_t>(u16_at(p)));
#else
  return half_to_float(u16_at(p));
#endif
}

inline void expand_f32(const std::byte* b, float* out) { *out = from_bits(u32_at(b)); }
inline void expand_f16(const std::byte* b, float* out) { *out = half_to_float(u16_at(b)); }
inline void expand_bf16(const std::byte* b, float* out) { *out = from_bits(u16_at(b) << 16); }

// kLanes bytes as integers, and integers as floats. Written out for x86, where gcc 12 widens bytes four times
// slower.
#if defined(__AVX512F__)
inline IntVec signed_at(const std::byte* p) {
  return reinterpret_cast<IntVec>(
      _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline IntVec unsigned_at(const std::byte* p) {
  return reinterpret_cast<IntVec>(
      _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#elif defined(__AVX2__)
inline IntVec signed_at(const std::byte* p) {
  return reinterpret_cast<IntVec>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline IntVec unsigned_at(const std::byte* p) {
  return reinterpret_cast<IntVec>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
#else
inline IntVec signed_at(const std::byte* p) {
  IntVec v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<int8_t>(p[i]);
  return v;
}
inline IntVec unsigned_at(const std::byte* p) {
  IntVec v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<uint8_t>(p[i]);
  return v;
}
#endif
inline Vec to_float(IntVec v) { return __builtin_convertvector(v, Vec); }

// Bits first, first + 1, ... of `bits`, one a lane, as 16 or 0: what a fifth bit is worth.
inline IntVec fifth_bits(uint32_t bits, int first) {
  IntVec shift;
  for (int i = 0; i < kLanes; ++i) shift[i] = first + i;
  return ((IntVec{} + static_cast<int32_t>(bits)) >> shift & 1) << 4;
}

// d, 32 signed bytes: d * q.
inline void expand_q8_0(const std::byte* b, float* out) {
  const float d = scale_at(b);
  for (int i = 0; i < 32; i += kLanes) store(out + i, d * to_float(signed_at(b + 2 + i)));
}

// d, 16 bytes: d * (q - 8).
inline void expand_q4_0(const std::byte* b, float* out) {
  const float d = scale_at(b);
  for (int i = 0; i < 16; i += kLanes) {
    const IntVec q = unsigned_at(b + 2 + i);
    store(out + i, d * to_float((q & 15) - 8));
    store(out + 16 + i, d * to_float((q >> 4) - 8));
  }
}

// d, m, 16 bytes: d * q + m.
inline void expand_q4_1(const std::byte* b, float* out) {
  const float d = scale_at(b), m = scale_at(b + 2);
  for (int i = 0; i < 16; i += kLanes) {
    const IntVec q = unsigned_at(b + 4 + i);
    store(out + i, d * to_float(q & 15) + m);
    store(out + 16 + i, d * to_float(q >> 4) + m);
  }
}

// d, 32 fifth bits, 16 bytes: d * (q - 16).
inline void expand_q5_0(const std::byte* b, float* out) {
  const float d = scale_at(b);
  const uint32_t fifth = u32_at(b + 2);
  for (int i = 0; i < 16; i += kLanes) {
    const IntVec q = unsigned_at(b + 6 + i);
    store(out + i, d * to_float((q & 15) + fifth_bits(fifth, i) - 16));
    store(out + 16 + i, d * to_float((q >> 4) + fifth_bits(fifth, 16 + i) - 16));
  }
}

// d, m, 32 fifth bits, 16 bytes: d * q + m.
inline void expand_q5_1(const std::byte* b, float* out) {
  const float d = scale_at(b), m = scale_at(b + 2);
  const uint32_t fifth = u32_at(b + 4);
  for (int i = 0; i < 16; i += kLanes) {
    const IntVec q = unsigned_at(b + 8 + i);
    store(out + i, d * to_float((q & 15) + fifth_bits(fifth, i)) + m);
    store(out + 16 + i, d * to_float((q >> 4) + fifth_bits(fifth, 16 + i)) + m);
  }
}

// The 6-bit scale and minimum of group `g` of 8, in the 12 bytes that q4_K and q5_K share: the first four of
// each lie in the low 6 bits of bytes 0-3 and 4-7, the last four are split between bytes 8-11 and the top
// bits of bytes 0-7.
struct ScaleAndMin {
  float scale, min;
};
inline ScaleAndMin group_scale(const std::byte* s, int g) {
  if (g < 4) return {static_cast<float>(byte_at(s + g) & 63), static_cast<float>(byte_at(s + 4 + g) & 63)};
  const uint32_t low = byte_at(s + 4 + g);
  return {static_cast<float>((low & 15) | byte_at(s + g - 4) >> 6 << 4),
          static_cast<float>(low >> 4 | byte_at(s + g) >> 6 << 4)};
}

// d, m, 12 bytes of scales, 128 bytes: d * scale * q - m * min, in 8 groups of 32; two groups share 32 bytes.
inline void expand_q4_K(const std::byte* b, float* out) {
  const float d = scale_at(b), m = scale_at(b + 2);
  for (int pair = 0; pair < 4; ++pair, out += 64) {
    const ScaleAndMin low = group_scale(b + 4, 2 * pair), high = group_scale(b + 4, 2 * pair + 1);
    const float d0 = d * low.scale, m0 = m * low.min, d1 = d * high.scale, m1 = m * high.min;
    const std::byte* q = b + 16 + 32 * pair;
    for (int i = 0; i < 32; i += kLanes) {
      const IntVec bytes = unsigned_at(q + i);
      store(out + i, d0 * to_float(bytes & 15) - m0);
      store(out + 32 + i, d1 * to_float(bytes >> 4) - m1);
    }
  }
}

// As q4_K, with 32 bytes of fifth bits before the 128: bit g of byte i belongs to element i of group g.
inline void expand_q5_K(const std::byte* b, float* out) {
  const float d = scale_at(b), m = scale_at(b + 2);
  const std::byte* fifth = b + 16;
  for (int pair = 0; pair < 4; ++pair, out += 64) {
    const ScaleAndMin low = group_scale(b + 4, 2 * pair), high = group_scale(b + 4, 2 * pair + 1);
    const float d0 = d * low.scale, m0 = m * low.min, d1 = d * high.scale, m1 = m * high.min;
    const std::byte* q = b + 48 + 32 * pair;
    for (int i = 0; i < 32; i += kLanes) {
      const IntVec bytes = unsigned_at(q + i), bits = unsigned_at(fifth + i) >> (2 * pair);
      store(out + i, d0 * to_float((bytes & 15) + ((bits & 1) << 4)) - m0);
      store(out + 32 + i, d1 * to_float((bytes >> 4) + ((bits & 2) << 3)) - m1);
    }
  }
}

// 128 bytes of low halves, 64 bytes of pairs of high bits, 16 signed scales, d: d * scale * (q - 32), in 16
// groups of 16. Each half of 128 elements has 64 low and 32 high bytes: byte i of the high ones serves
// elements i, 32 + i, 64 + i, 96 + i.
inline void expand_q6_K(const std::byte* b, float* out) {
  const float d = scale_at(b + 208);
  for (int half = 0; half < 2; ++half, out += 128) {
    const std::byte *low = b + 64 * half, *high = b + 128 + 32 * half, *scales = b + 192 + 8 * half;
    const auto scale = [&](int group) { return d * static_cast<float>(static_cast<int8_t>(scales[group])); };
    for (int i = 0; i < 32; i += kLanes) {
      const IntVec l0 = unsigned_at(low + i), l1 = unsigned_at(low + 32 + i), h = unsigned_at(high + i);
      const int group = i / 16;
      store(out + i, scale(group) * to_float((l0 & 15) + ((h & 3) << 4) - 32));
      store(out + 32 + i, scale(2 + group) * to_float((l1 & 15) + ((h & 12) << 2) - 32));
      store(out + 64 + i, scale(4 + group) * to_float((l0 >> 4) + (h & 48) - 32));
      store(out + 96 + i, scale(6 + group) * to_float((l1 >> 4) + ((h & 192) >> 2) - 32));
    }
  }
}

}  // namespace
}  // namespace thimble::cpu
