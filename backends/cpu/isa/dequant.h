// The block formats of base/dtype.h as floats: one type each, the definition that other backends follow.
//
// expand() makes the floats of a block, or of a few elements of types that have none, and hands them on in
// vectors as it goes: use(slot, i, v) gets elements i to i + kLanes - 1. They never pass through memory, and
// `slot`, 0 or 1 in turns, is a constant wherever it is inlined: a dot has a sum for each.
//
// A block's bytes, little-endian: its scales first, then packed integers. d and m are halves. In the 4 and 5
// bit types of 32 elements the low halves of 16 bytes are elements 0 to 15, the high halves 16 to 31.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/isa/vector.h"
#include "base/dtype.h"

#if !defined(__F16C__)
#include "base/bits.h"
#endif

namespace thimble::cpu {
namespace {

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

// A half, a block's scale; where there is an instruction for it, that takes a third off the time of a q8_0
// dot.
inline float scale_at(const std::byte* p) {
#if defined(__F16C__)
  return _cvtsh_ss(static_cast<uint16_t>(u16_at(p)));
#else
  return f16_to_f32(static_cast<uint16_t>(u16_at(p)));
#endif
}

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

// 16 bytes as floats, the first 8 times a and the others times b.
typedef uint32_t Words __attribute__((vector_size(16)));
inline void store_bytes(Words bytes, float a, float b, float* out) {
#if defined(__AVX512F__)
  const Vec factors = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
  store(out, factors * to_float(reinterpret_cast<IntVec>(
                           _mm512_maskz_cvtepu8_epi32(0xffff, reinterpret_cast<__m128i>(bytes)))));
#elif defined(__AVX2__)
  const __m128i all = reinterpret_cast<__m128i>(bytes);
  store(out, a * to_float(reinterpret_cast<IntVec>(_mm256_cvtepu8_epi32(all))));
  store(out + 8, b * to_float(reinterpret_cast<IntVec>(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)))));
#else
  for (int i = 0; i < 16; ++i) out[i] = (i < 8 ? a : b) * static_cast<float>(bytes[i / 4] >> i % 4 * 8 & 255);
#endif
}
// Scales that are read from memory one by one: taken from the lanes of a vector, each costs a shuffle and a
// broadcast (q4_K 9.8 GB/s instead of 10.9).
template <int n>
inline void keep_in_memory(float (&scales)[n]) {
  __asm__("" : "+m"(scales));
}

// ---- no blocks: two vectors at a time, or one element ----

template <uint32_t bytes, float (*element)(const std::byte*), Vec (*vector)(const std::byte*)>
struct Plain {
  static constexpr uint32_t kBlock = 1, kBytes = bytes;
  static float one(const std::byte* b) { return element(b); }
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    use(0, 0, vector(b));
    use(1, kLanes, vector(b + kLanes * bytes));
  }
};

inline float f32_at(const std::byte* b) { return from_bits(u32_at(b)); }
inline Vec f32s_at(const std::byte* b) { return load(reinterpret_cast<const float*>(b)); }
using F32 = Plain<4, f32_at, f32s_at>;

inline Vec f16s_at(const std::byte* b) { return load_halves(b); }
using F16 = Plain<2, scale_at, f16s_at>;

inline float bf16_at(const std::byte* b) { return from_bits(u16_at(b) << 16); }
inline Vec bf16s_at(const std::byte* b) { return reinterpret_cast<Vec>(load_words(b) << 16); }
using BF16 = Plain<2, bf16_at, bf16s_at>;

// ---- blocks of 32 ----

// d, 32 signed bytes: d * q.
struct Q8_0 {
  static constexpr uint32_t kBlock = 32, kBytes = 34;
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b);
#pragma GCC unroll 8
    for (int i = 0; i < 32; i += kLanes) use(i / kLanes % 2, i, d * to_float(signed_at(b + 2 + i)));
  }
};

// d, 16 bytes: d * (q - 8).
struct Q4_0 {
  static constexpr uint32_t kBlock = 32, kBytes = 18;
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b);
    for (int i = 0; i < 16; i += kLanes) {
      const IntVec q = unsigned_at(b + 2 + i);
      use(0, i, d * to_float((q & 15) - 8));
      use(1, 16 + i, d * to_float((q >> 4) - 8));
    }
  }
};

// d, m, 16 bytes: d * q + m.
struct Q4_1 {
  static constexpr uint32_t kBlock = 32, kBytes = 20;
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b), m = scale_at(b + 2);
    for (int i = 0; i < 16; i += kLanes) {
      const IntVec q = unsigned_at(b + 4 + i);
      use(0, i, d * to_float(q & 15) + m);
      use(1, 16 + i, d * to_float(q >> 4) + m);
    }
  }
};

// d, 32 fifth bits, 16 bytes: d * (q - 16).
struct Q5_0 {
  static constexpr uint32_t kBlock = 32, kBytes = 22;
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b);
    const uint32_t fifth = u32_at(b + 2);
    for (int i = 0; i < 16; i += kLanes) {
      const IntVec q = unsigned_at(b + 6 + i);
      use(0, i, d * to_float((q & 15) + fifth_bits(fifth, i) - 16));
      use(1, 16 + i, d * to_float((q >> 4) + fifth_bits(fifth, 16 + i) - 16));
    }
  }
};

// d, m, 32 fifth bits, 16 bytes: d * q + m.
struct Q5_1 {
  static constexpr uint32_t kBlock = 32, kBytes = 24;
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b), m = scale_at(b + 2);
    const uint32_t fifth = u32_at(b + 4);
    for (int i = 0; i < 16; i += kLanes) {
      const IntVec q = unsigned_at(b + 8 + i);
      use(0, i, d * to_float((q & 15) + fifth_bits(fifth, i)) + m);
      use(1, 16 + i, d * to_float((q >> 4) + fifth_bits(fifth, 16 + i)) + m);
    }
  }
};

// ---- blocks of 256 ----

// The scales and minima of the 8 groups of q4_K and q5_K, times d and m, from 12 bytes behind these: the
// first four of each lie in the low 6 bits of bytes 0-3 and 4-7, the last four are split between bytes 8-11
// and the top bits of bytes 0-7.
struct GroupScales {
  float of[16];  // scales, minima
  explicit GroupScales(const std::byte* b) {
    const uint32_t low = u32_at(b + 4), middle = u32_at(b + 8), high = u32_at(b + 12);
    const Words packed = {low & 0x3f3f3f3f, (high & 0x0f0f0f0f) | (low >> 2 & 0x30303030),
                          middle & 0x3f3f3f3f, (high >> 4 & 0x0f0f0f0f) | (middle >> 2 & 0x30303030)};
    store_bytes(packed, scale_at(b), scale_at(b + 2), of);
    keep_in_memory(of);
  }
  float scale(int group) const { return of[group]; }
  float min(int group) const { return of[8 + group]; }
};

// d, m, 12 bytes of scales, 128 bytes: d * scale * q - m * min, in 8 groups of 32; two groups share 32 bytes.
struct Q4_K {
  static constexpr uint32_t kBlock = 256, kBytes = 144;
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const GroupScales g(b);
    for (int pair = 0; pair < 4; ++pair)
      for (int i = 0; i < 32; i += kLanes) {
        const IntVec q = unsigned_at(b + 16 + 32 * pair + i);
        use(0, 64 * pair + i, g.scale(2 * pair) * to_float(q & 15) - g.min(2 * pair));
        use(1, 64 * pair + 32 + i, g.scale(2 * pair + 1) * to_float(q >> 4) - g.min(2 * pair + 1));
      }
  }
};

// As q4_K, with 32 bytes of fifth bits before the 128: bit g of byte i belongs to element i of group g.
struct Q5_K {
  static constexpr uint32_t kBlock = 256, kBytes = 176;
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const GroupScales g(b);
    for (int pair = 0; pair < 4; ++pair)
      for (int i = 0; i < 32; i += kLanes) {
        const IntVec q = unsigned_at(b + 48 + 32 * pair + i), bits = unsigned_at(b + 16 + i) >> (2 * pair);
        use(0, 64 * pair + i, g.scale(2 * pair) * to_float((q & 15) + ((bits & 1) << 4)) - g.min(2 * pair));
        use(1, 64 * pair + 32 + i,
            g.scale(2 * pair + 1) * to_float((q >> 4) + ((bits & 2) << 3)) - g.min(2 * pair + 1));
      }
  }
};

// 128 bytes of low halves, 64 bytes of pairs of high bits, 16 signed scales, d: d * scale * (q - 32), in 16
// groups of 16. Each half of 128 elements has 64 low and 32 high bytes: byte i of the high ones serves
// elements i, 32 + i, 64 + i, 96 + i.
struct Q6_K {
  static constexpr uint32_t kBlock = 256, kBytes = 210;
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b + 208);
    float scales[16];
    for (int i = 0; i < 16; i += kLanes) store(scales + i, d * to_float(signed_at(b + 192 + i)));
    keep_in_memory(scales);
    for (int half = 0; half < 2; ++half) {
      const std::byte *low = b + 64 * half, *high = b + 128 + 32 * half;
      for (int i = 0; i < 32; i += kLanes) {
        const IntVec l0 = unsigned_at(low + i), l1 = unsigned_at(low + 32 + i), h = unsigned_at(high + i);
        const float* scale = scales + 8 * half + i / 16;
        const int at = 128 * half + i;
        use(0, at, scale[0] * to_float((l0 & 15) + ((h & 3) << 4) - 32));
        use(1, at + 32, scale[2] * to_float((l1 & 15) + ((h & 12) << 2) - 32));
        use(0, at + 64, scale[4] * to_float((l0 >> 4) + (h & 48) - 32));
        use(1, at + 96, scale[6] * to_float((l1 >> 4) + ((h & 192) >> 2) - 32));
      }
    }
  }
};

}  // namespace
}  // namespace thimble::cpu
