// Converts the block formats of base/dtype.h to floats, one struct per type. This is the definition that
// other backends follow.
//
// expand() produces the floats of a block (or of a few elements, for types without blocks) and passes them on
// in vectors: use(slot, i, v) receives elements i to i + kLanes - 1. The floats never pass through memory.
// `slot` alternates between 0 and 1 and is a constant wherever it is inlined: a dot product keeps one sum for
// each.
//
// The bytes of a block are little-endian: first scales, then packed integers. d and m are halves. In the 4-
// and 5-bit types of 32 elements, the low nibbles of 16 bytes are elements 0 to 15 and the high nibbles are
// elements 16 to 31.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/codebooks.h"
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

// Reads a half, a block's scale. The conversion instruction, where there is one, takes a third off the time
// of a q8_0 dot product.
inline float scale_at(const std::byte* p) {
#if defined(__F16C__)
  return _cvtsh_ss(static_cast<uint16_t>(u16_at(p)));
#else
  return f16_to_f32(static_cast<uint16_t>(u16_at(p)));
#endif
}

// kLanes bytes as integers, and integers as floats. Written with intrinsics for x86, because gcc 12 widens
// bytes four times slower.
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

// Bits first, first + 1, ... of `bits`, one per lane, as 16 or 0, the value of a fifth bit.
inline IntVec fifth_bits(uint32_t bits, int first) {
  IntVec shift;
  for (int i = 0; i < kLanes; ++i) shift[i] = first + i;
  return ((IntVec{} + static_cast<int32_t>(bits)) >> shift & 1) << 4;
}

// kLanes of 16 bytes from byte `first` on, as integers.
typedef uint32_t Words __attribute__((vector_size(16)));
inline IntVec unsigned_of(Words bytes, int first) {
#if defined(__AVX512F__)
  static_cast<void>(first);  // all lanes
  return reinterpret_cast<IntVec>(_mm512_maskz_cvtepu8_epi32(0xffff, reinterpret_cast<__m128i>(bytes)));
#elif defined(__AVX2__)
  const __m128i all = reinterpret_cast<__m128i>(bytes);
  return reinterpret_cast<IntVec>(_mm256_cvtepu8_epi32(first ? _mm_srli_si128(all, 8) : all));
#else
  const uint32_t four = bytes[first / 4];
  IntVec v;
  for (int i = 0; i < 4; ++i) v[i] = static_cast<int32_t>(four >> 8 * i & 255);
  return v;
#endif
}
// 16 bytes as floats, the first 8 multiplied by a and the others by b.
inline void store_bytes(Words bytes, float a, float b, float* out) {
  for (int i = 0; i < 16; i += kLanes) {
    Vec factors;
    for (int lane = 0; lane < kLanes; ++lane) factors[lane] = i + lane < 8 ? a : b;
    store(out + i, factors * to_float(unsigned_of(bytes, i)));
  }
}
// Scales that are read from memory one by one. Taking them from the lanes of a vector would cost a shuffle
// and a broadcast each (q4_K 9.8 GB/s instead of 10.9).
template <int n>
inline void keep_in_memory(float (&scales)[n]) {
  __asm__("" : "+m"(scales));
}

// ---- types without blocks: two vectors at a time, or one element ----

template <DType type, float (*element)(const std::byte*), Vec (*vector)(const std::byte*)>
struct Plain : BlockOf<type> {
  static float one(const std::byte* b) { return element(b); }
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    use(0, 0, vector(b));
    use(1, kLanes, vector(b + kLanes * BlockOf<type>::kBytes));
  }
};

inline float f32_at(const std::byte* b) { return from_bits(u32_at(b)); }
inline Vec f32s_at(const std::byte* b) { return load(reinterpret_cast<const float*>(b)); }
using F32 = Plain<DType::kF32, f32_at, f32s_at>;

inline Vec f16s_at(const std::byte* b) { return load_halves(b); }
using F16 = Plain<DType::kF16, scale_at, f16s_at>;

inline float bf16_at(const std::byte* b) { return from_bits(u16_at(b) << 16); }
inline Vec bf16s_at(const std::byte* b) { return reinterpret_cast<Vec>(load_words(b) << 16); }
using BF16 = Plain<DType::kBF16, bf16_at, bf16s_at>;

// ---- blocks of 32 ----

// Bytes: d, 32 signed bytes. Value: d * q.
struct Q8_0 : BlockOf<DType::kQ8_0> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b);
#pragma GCC unroll 8
    for (int i = 0; i < 32; i += kLanes) use(i / kLanes % 2, i, d * to_float(signed_at(b + 2 + i)));
  }
};

// Bytes: d, 16 bytes. Value: d * (q - 8).
struct Q4_0 : BlockOf<DType::kQ4_0> {
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

// Bytes: d, m, 16 bytes. Value: d * q + m.
struct Q4_1 : BlockOf<DType::kQ4_1> {
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

// Bytes: d, 32 fifth bits, 16 bytes. Value: d * (q - 16).
struct Q5_0 : BlockOf<DType::kQ5_0> {
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

// Bytes: d, m, 32 fifth bits, 16 bytes. Value: d * q + m.
struct Q5_1 : BlockOf<DType::kQ5_1> {
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

// ---- blocks of 32 whose nibbles index a table of 16 values ----

// Calls use() for 32 elements from `at` on. make(i) returns those from i on; i is a multiple of kLanes and a
// constant where it is inlined.
template <typename Make, typename Use>
inline void use_32(int at, const Make& make, const Use& use) {
#pragma GCC unroll 8
  for (int i = 0; i < 32; i += kLanes) use(i / kLanes % 2, at + i, make(i));
}

// Looks up values[i] for each lane.
typedef float Values[16];
inline Vec lookup(const Values& values, IntVec i) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(i), _mm512_loadu_ps(values)));
#elif defined(__AVX2__)
  const __m256i places = reinterpret_cast<__m256i>(i);
  return reinterpret_cast<Vec>(
      _mm256_blendv_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(values), places),
                       _mm256_permutevar8x32_ps(_mm256_loadu_ps(values + 8), places),
                       _mm256_castsi256_ps(_mm256_slli_epi32(places, 28))));  // selects by bit 3
#else
  Vec v;
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = values[i[lane]];
  return v;
#endif
}
constexpr Values kIq4Values = {THIMBLE_IQ4_VALUES}, kFp4Values = {THIMBLE_FP4_VALUES};

// 16 bytes; the low nibbles are elements 0 to 15, the high nibbles the others.
template <typename Use>
inline void use_nibbles(const std::byte* quants, const Values& values, float scale, int at, const Use& use) {
  use_32(
      at,
      [&](int i) __attribute__((always_inline)) {
        const IntVec q = unsigned_at(quants + i % 16);
        return scale * lookup(values, i < 16 ? q & 15 : q >> 4);
      },
      use);
}

// Bytes: d, 16 bytes. Value: d * value.
struct IQ4_NL : BlockOf<DType::kIQ4_NL> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    use_nibbles(b + 2, kIq4Values, scale_at(b), 0, use);
  }
};

// Bytes: an exponent x, 16 bytes. Value: 2^(x - 128) * value, since the table's values are doubled.
struct MXFP4 : BlockOf<DType::kMXFP4> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const uint32_t x = static_cast<uint32_t>(b[0]);  // 2^-128 and 2^-127 are subnormal
    use_nibbles(b + 1, kFp4Values, from_bits(x < 2 ? 0x00200000u << x : (x - 1) << 23), 0, use);
  }
};

// ---- blocks of 64 whose nibbles index such a table ----

// Half of numbers of 8 bits: no sign, 4 bits of exponent, 3 of mantissa (E4M3). The last number stands for
// NaN and is read as 0.
inline Vec half_of_e4m3(IntVec bits) {
  const IntVec exponent = bits >> 3 & 15, normal = exponent > 0;  // -1: there is a leading 1
  const IntVec mantissa = ((bits & 7) | (normal & 8)) & (bits != 127), power = exponent + normal + 1;
  return to_float(mantissa) * reinterpret_cast<Vec>((power + (127 - 11)) << 23);
}
// Eight bytes as integers, twice if there are more lanes; the byte of lane i is that of lane i + 8.
inline IntVec eight_bytes_at(const std::byte* p) {
#if defined(__AVX512F__)
  uint64_t bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return reinterpret_cast<IntVec>(
      _mm512_maskz_cvtepu8_epi32(0xffff, _mm_set1_epi64x(static_cast<long long>(bytes))));
#else
  return unsigned_at(p);
#endif
}

// Bytes: 4 scales of 16 elements each; for each of these groups 8 bytes, of which the low nibbles are
// elements 0 to 7 and the high nibbles the others. Value: scale / 2 * value, since the table's values are
// doubled.
struct NVFP4 : BlockOf<DType::kNVFP4> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    float scales[kLanes];  // the first four
    store(scales, half_of_e4m3(unsigned_at(b)));
    keep_in_memory(scales);
    for (int at = 0; at < 64; at += 32)
      use_32(
          at,
          [&](int i) __attribute__((always_inline)) {
            IntVec shift;
            for (int lane = 0; lane < kLanes; ++lane) shift[lane] = (i + lane) % 16 / 8 * 4;
            const int group = (at + i) / 16;
            const IntVec q = eight_bytes_at(b + 4 + 8 * group + i % 8) >> shift & 15;
            return scales[group] * lookup(kFp4Values, q);
          },
          use);
  }
};

// ---- blocks of 256 ----

// The scales and minima of the 8 groups of q4_K and q5_K, times d and m, from the 12 bytes after these. The
// first four of each are the low 6 bits of bytes 0-3 and 4-7. The last four are split between bytes 8-11 and
// the top bits of bytes 0-7.
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

// Bytes: d, m, 12 bytes of scales, 128 bytes. Value: d * scale * q - m * min, in 8 groups of 32; two groups
// share 32 bytes.
struct Q4_K : BlockOf<DType::kQ4_K> {
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

// As q4_K, with 32 bytes of fifth bits before the 128 bytes: bit g of byte i belongs to element i of group g.
struct Q5_K : BlockOf<DType::kQ5_K> {
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

// Bytes: 128 bytes of nibbles, 64 bytes of pairs of high bits, 16 signed scales, d. Value: d * scale * (q -
// 32), in 16 groups of 16. Each half of 128 elements has 64 low and 32 high bytes: byte i of the high ones
// belongs to elements i, 32 + i, 64 + i, 96 + i.
struct Q6_K : BlockOf<DType::kQ6_K> {
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

// 16 scales in [0, 64), packed into 12 bytes: the low nibbles of bytes 0 to 7, then their high nibbles, with
// two more bits each from bytes 8 to 11.
struct Scales6 {
  float of[16];  // with 32 subtracted, times d
  Scales6(const std::byte* b, float d) {
    const uint32_t first = u32_at(b), second = u32_at(b + 4), pairs = u32_at(b + 8);
    const uint32_t halves = 0x0f0f0f0f, bits = 0x30303030;
    const Words packed = {(first & halves) | (pairs << 4 & bits), (second & halves) | (pairs << 2 & bits),
                          (first >> 4 & halves) | (pairs & bits),
                          (second >> 4 & halves) | (pairs >> 2 & bits)};
    store_bytes(packed, d, d, of);
    for (int i = 0; i < 16; i += kLanes) store(of + i, load(of + i) - 32 * d);  // exact
    keep_in_memory(of);
  }
};

// Bytes: 16 bytes of scales (low nibbles) and minima (high nibbles), 64 bytes of pairs of bits, d, m. Value:
// d * scale * q - m * min, in 16 groups of 16. Each half of 128 elements has 32 bytes: byte i belongs to
// elements i, 32 + i, 64 + i, 96 + i.
struct Q2_K : BlockOf<DType::kQ2_K> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b + 80), m = scale_at(b + 82);
    float scales[16], minima[16];
    for (int i = 0; i < 16; i += kLanes) {
      const IntVec both = unsigned_at(b + i);
      store(scales + i, d * to_float(both & 15));
      store(minima + i, m * to_float(both >> 4));
    }
    keep_in_memory(scales);
    keep_in_memory(minima);
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 32; i += kLanes) {
        const IntVec q = unsigned_at(b + 16 + 32 * half + i);
        const float *scale = scales + 8 * half + i / 16, *min = minima + 8 * half + i / 16;
        const int at = 128 * half + i;
        use(0, at, scale[0] * to_float(q & 3) - min[0]);
        use(1, at + 32, scale[2] * to_float(q >> 2 & 3) - min[2]);
        use(0, at + 64, scale[4] * to_float(q >> 4 & 3) - min[4]);
        use(1, at + 96, scale[6] * to_float(q >> 6) - min[6]);
      }
  }
};

// Bytes: 32 bytes of third bits, bit g of byte i for element i of group g of 32; 64 bytes of pairs of bits as
// in q2_K; 12 bytes of scales; d. Value: d * (scale - 32) * (q - 4), in 16 groups of 16.
struct Q3_K : BlockOf<DType::kQ3_K> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const Scales6 scales(b + 96, scale_at(b + 108));
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 32; i += kLanes) {
        const IntVec q = unsigned_at(b + 32 + 32 * half + i), third = unsigned_at(b + i) >> 4 * half;
        const float* scale = scales.of + 8 * half + i / 16;
        const int at = 128 * half + i;
        use(0, at, scale[0] * to_float((q & 3) + (third << 2 & 4) - 4));
        use(1, at + 32, scale[2] * to_float((q >> 2 & 3) + (third << 1 & 4) - 4));
        use(0, at + 64, scale[4] * to_float((q >> 4 & 3) + (third & 4) - 4));
        use(1, at + 96, scale[6] * to_float((q >> 6) + (third >> 1 & 4) - 4));
      }
  }
};

// Bytes: d, 2 bytes with the high bits of the 8 scales in pairs, 4 bytes with their low nibbles, 128 bytes of
// nibbles. Value: d * (scale - 32) * value, in 8 groups of 32.
struct IQ4_XS : BlockOf<DType::kIQ4_XS> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b);
    const uint32_t high = u16_at(b + 2), low = u32_at(b + 4);
    for (int part = 0; part < 8; ++part) {
      const uint32_t scale = (low >> 4 * part & 15) | (high >> 2 * part & 3) << 4;
      use_nibbles(b + 8 + 16 * part, kIq4Values, d * static_cast<float>(static_cast<int32_t>(scale) - 32),
                  32 * part, use);
    }
  }
};

// ---- blocks of 256 whose elements come from a code book (backends/codebooks.h) ----

constexpr uint16_t kIq2XxsGrid[] = {THIMBLE_IQ2_XXS_GRID};
constexpr uint16_t kIq2XsGrid[] = {THIMBLE_IQ2_XS_GRID};
constexpr uint16_t kIq2SGrid[] = {THIMBLE_IQ2_S_GRID};
constexpr uint16_t kIq3XxsGrid[] = {THIMBLE_IQ3_XXS_GRID};
constexpr uint16_t kIq3SGrid[] = {THIMBLE_IQ3_S_GRID};
constexpr uint16_t kIq1Grid[] = {THIMBLE_IQ1_GRID};
constexpr Values kIq2Values = {THIMBLE_IQ2_VALUES}, kIq3XxsValues = {THIMBLE_IQ3_XXS_VALUES},
                 kIq3SValues = {THIMBLE_IQ3_S_VALUES};

// Lanes for two groups of eight elements: those of elements 0 to 7 get a, those of elements 8 to 15 get b.
// `first` is the element of the first lane.
template <typename Lanes, typename T>
inline Lanes by_eights(T a, T b, int first) {
  if constexpr (kLanes <= 8) return Lanes{} + (first % 16 < 8 ? a : b);
  IntVec second;
  for (int i = 0; i < kLanes; ++i) second[i] = i < 8 ? 0 : -1;
  return second ? Lanes{} + b : Lanes{} + a;
}
// v with signs taken from the bits of `signs` from bit `first` on.
inline Vec with_signs(Vec v, uint32_t signs, int first) {
  IntVec shift;
  for (int i = 0; i < kLanes; ++i) shift[i] = 31 - first - i;
  const IntVec sign = (IntVec{} + static_cast<int32_t>(signs)) << shift & static_cast<int32_t>(0x80000000);
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(v) ^ sign);
}
// Eight sign bits from seven: the number of set bits is even.
inline uint32_t even_signs(uint32_t seven) { return seven | (__builtin_popcount(seven) & 1u) << 7; }

// 32 elements: 16 with scales[0], 16 with scales[1], one bit of `signs` each.
struct Signed32 {
  float scales[2];
  uint32_t signs;
};

// iq2: four entries of the code book.
template <typename Use>
inline void use_iq2(int at, const Signed32& s, uint32_t first, uint32_t second, const Use& use) {
  use_32(
      at,
      [&](int i) __attribute__((always_inline)) {
        IntVec shift;
        for (int lane = 0; lane < kLanes; ++lane) shift[lane] = 2 * (i % 16 + lane);
        const IntVec place = (IntVec{} + static_cast<int32_t>(i < 16 ? first : second)) >> shift & 3;
        return with_signs(s.scales[i / 16] * lookup(kIq2Values, place), s.signs, i);
      },
      use);
}
// iq3: eight entries, two per word.
template <typename Use>
inline void use_iq3(int at, const Signed32& s, const Values& values, const uint32_t (&words)[4],
                    const Use& use) {
  use_32(
      at,
      [&](int i) __attribute__((always_inline)) {
        IntVec shift;
        for (int lane = 0; lane < kLanes; ++lane) shift[lane] = 4 * ((i + lane) % 8);
        const IntVec place = by_eights<IntVec>(static_cast<int32_t>(words[i / 16 * 2]),
                                               static_cast<int32_t>(words[i / 16 * 2 + 1]), i) >>
                                 shift &
                             7;
        return with_signs(s.scales[i / 16] * lookup(values, place), s.signs, i);
      },
      use);
}
// iq1: four entries, and the offset that is added to each eight elements.
template <typename Use>
inline void use_iq1(int at, const float (&scales)[2], const float (&offsets)[4], uint32_t first,
                    uint32_t second, const Use& use) {
  use_32(
      at,
      [&](int i) __attribute__((always_inline)) {
        IntVec shift;
        for (int lane = 0; lane < kLanes; ++lane) shift[lane] = 2 * (i % 16 + lane);
        const IntVec place = (IntVec{} + static_cast<int32_t>(i < 16 ? first : second)) >> shift & 3;
        const Vec offset = by_eights<Vec>(offsets[i / 16 * 2], offsets[i / 16 * 2 + 1], i);
        return scales[i / 16] * (to_float(place - 1) + offset);
      },
      use);
}
inline float as_float(uint32_t n) { return static_cast<float>(static_cast<int32_t>(n)); }
inline uint32_t byte_at(const std::byte* p) { return static_cast<uint32_t>(*p); }

// Bytes: d; for each 32 elements 4 bytes of entries, then a word with seven signs for each entry and the
// scale in its top 4 bits. Value: d * (scale + 1/2) / 4 * value.
struct IQ2_XXS : BlockOf<DType::kIQ2_XXS> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b) * 0.25f;
    for (int part = 0; part < 8; ++part) {
      const std::byte* entries = b + 2 + 8 * part;
      const uint32_t w = u32_at(entries + 4);
      const float scale = d * (0.5f + as_float(w >> 28));
      const auto entry = [&](int i) { return uint32_t{kIq2XxsGrid[byte_at(entries + i)]}; };
      use_iq2(32 * part,
              {{scale, scale},
               even_signs(w & 127) | even_signs(w >> 7 & 127) << 8 | even_signs(w >> 14 & 127) << 16 |
                   even_signs(w >> 21 & 127) << 24},
              entry(0) | entry(1) << 16, entry(2) | entry(3) << 16, use);
    }
  }
};

// Bytes: d; for each 8 elements an entry of 9 bits and seven signs; 8 bytes with a scale for each 16
// elements.
struct IQ2_XS : BlockOf<DType::kIQ2_XS> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b) * 0.25f;
    for (int part = 0; part < 8; ++part) {
      const std::byte* entries = b + 2 + 8 * part;
      const uint32_t scales = byte_at(b + 66 + part);
      const auto entry = [&](int i) { return uint32_t{kIq2XsGrid[u16_at(entries + 2 * i) & 511]}; };
      const auto signs = [&](int i) { return even_signs(u16_at(entries + 2 * i) >> 9) << 8 * i; };
      use_iq2(32 * part,
              {{d * (0.5f + as_float(scales & 15)), d * (0.5f + as_float(scales >> 4))},
               signs(0) | signs(1) | signs(2) | signs(3)},
              entry(0) | entry(1) << 16, entry(2) | entry(3) << 16, use);
    }
  }
};

// Bytes: d; 32 bytes with the low 8 bits of entries; 32 of signs; 8 with the high two bits of entries; 8 of
// scales.
struct IQ2_S : BlockOf<DType::kIQ2_S> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b) * 0.25f;
    for (int part = 0; part < 8; ++part) {
      const uint32_t scales = byte_at(b + 74 + part), high = byte_at(b + 66 + part);
      const auto entry = [&](int i) {
        return uint32_t{kIq2SGrid[byte_at(b + 2 + 4 * part + i) | (high >> 2 * i & 3) << 8]};
      };
      use_iq2(32 * part,
              {{d * (0.5f + as_float(scales & 15)), d * (0.5f + as_float(scales >> 4))},
               u32_at(b + 34 + 4 * part)},
              entry(0) | entry(1) << 16, entry(2) | entry(3) << 16, use);
    }
  }
};

// Bytes: d; 64 bytes of entries of four elements; for each 32 elements a word with seven signs for each 8 and
// the scale in its top 4 bits. Value: d * (scale + 1/2) / 2 * value.
struct IQ3_XXS : BlockOf<DType::kIQ3_XXS> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b) * 0.5f;
    for (int part = 0; part < 8; ++part) {
      const uint32_t w = u32_at(b + 66 + 4 * part);
      const float scale = d * (0.5f + as_float(w >> 28));
      uint32_t words[4];
      for (int i = 0; i < 4; ++i) {
        const std::byte* entries = b + 2 + 8 * part + 2 * i;
        words[i] = uint32_t{kIq3XxsGrid[byte_at(entries)]} | uint32_t{kIq3XxsGrid[byte_at(entries + 1)]}
                                                                 << 16;
      }
      use_iq3(32 * part,
              {{scale, scale},
               even_signs(w & 127) | even_signs(w >> 7 & 127) << 8 | even_signs(w >> 14 & 127) << 16 |
                   even_signs(w >> 21 & 127) << 24},
              kIq3XxsValues, words, use);
    }
  }
};

// Bytes: d; 64 bytes with the low 8 bits of entries; 8 with their ninth bits; 32 of signs; 4 with a scale for
// each 32 elements. Value: d * (2 scale + 1) * value.
struct IQ3_S : BlockOf<DType::kIQ3_S> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b);
    for (int part = 0; part < 8; ++part) {
      const float scale = d * as_float(1 + 2 * (byte_at(b + 106 + part / 2) >> part % 2 * 4 & 15));
      const uint32_t ninth = byte_at(b + 66 + part);
      const auto entry = [&](int i) {
        return uint32_t{kIq3SGrid[byte_at(b + 2 + 8 * part + i) | (ninth >> i & 1) << 8]};
      };
      const uint32_t words[4] = {entry(0) | entry(1) << 16, entry(2) | entry(3) << 16,
                                 entry(4) | entry(5) << 16, entry(6) | entry(7) << 16};
      use_iq3(32 * part, {{scale, scale}, u32_at(b + 74 + 4 * part)}, kIq3SValues, words, use);
    }
  }
};

// Bytes: d; 32 bytes with the low 8 bits of entries; for each 32 elements 16 bits: 3 high bits of each entry,
// 3 bits of scale, and the sign of the 1/8. Value: d * (2 scale + 1) * (value +- 1/8).
struct IQ1_S : BlockOf<DType::kIQ1_S> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b);
    for (int part = 0; part < 8; ++part) {
      const uint32_t high = u16_at(b + 34 + 2 * part);
      const float scale = d * as_float(1 + 2 * (high >> 12 & 7)), offset = high >> 15 ? -0.125f : 0.125f;
      const auto entry = [&](int i) {
        return uint32_t{kIq1Grid[byte_at(b + 2 + 4 * part + i) | (high >> 3 * i & 7) << 8]};
      };
      use_iq1(32 * part, {scale, scale}, {offset, offset, offset, offset}, entry(0) | entry(1) << 16,
              entry(2) | entry(3) << 16, use);
    }
  }
};

// Bytes: 32 bytes with the low 8 bits of entries; 16 bytes with a nibble for each entry: 3 high bits and the
// sign of its 1/8; four times 16 bits: scales of 3 bits for each 16 elements, and a quarter of d in the top 4
// bits.
struct IQ1_M : BlockOf<DType::kIQ1_M> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const uint32_t bits = u16_at(b + 48) >> 12 | (u16_at(b + 50) >> 12) << 4 | (u16_at(b + 52) >> 12) << 8 |
                          (u16_at(b + 54) >> 12) << 12;
    std::byte half[2];
    __builtin_memcpy(half, &bits, sizeof half);
    const float d = scale_at(half);
    for (int part = 0; part < 8; ++part) {
      const uint32_t scales = u16_at(b + 48 + part / 2 * 2) >> part % 2 * 6, high = u16_at(b + 32 + 2 * part);
      const auto entry = [&](int i) {
        return uint32_t{kIq1Grid[byte_at(b + 4 * part + i) | (high >> 4 * i & 7) << 8]};
      };
      const auto offset = [&](int i) { return high >> 4 * i & 8 ? -0.125f : 0.125f; };
      use_iq1(32 * part, {d * as_float(1 + 2 * (scales & 7)), d * as_float(1 + 2 * (scales >> 3 & 7))},
              {offset(0), offset(1), offset(2), offset(3)}, entry(0) | entry(1) << 16,
              entry(2) | entry(3) << 16, use);
    }
  }
};

// ---- blocks of 256 numbers that are -1, 0 or 1 ----

// Bytes: 64 bytes of pairs of bits as in q2_K, d. Value: d * (q - 1).
struct TQ2_0 : BlockOf<DType::kTQ2_0> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b + 64);
    for (int part = 0; part < 8; ++part)
      use_32(
          32 * part,
          [&](int i) __attribute__((always_inline)) {
            return d * to_float((unsigned_at(b + part / 4 * 32 + i) >> part % 4 * 2 & 3) - 1);
          },
          use);
  }
};

// Bytes: 48 bytes of five base-3 digits each, 4 bytes of four digits, d. Value: d * (digit - 1). A byte is a
// fraction of 256: multiplying it by 3 repeatedly yields its digits one after another as overflow. The first
// digits of 32 bytes are elements 0 to 31, the second digits are 32 to 63, and so on; the same holds for the
// next 16 bytes, and then for the last 4.
struct TQ1_0 : BlockOf<DType::kTQ1_0> {
  static inline Vec digits(IntVec bytes, IntVec power) {
    return to_float(((bytes * power & 255) * 3 >> 8) - 1);
  }
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    constexpr int kPowers[] = {1, 3, 9, 27, 81};
    const float d = scale_at(b + 52);
    for (int n = 0; n < 5; ++n)
      use_32(
          32 * n,
          [&](int i) __attribute__((always_inline)) {
            return d * digits(unsigned_at(b + i), IntVec{} + kPowers[n]);
          },
          use);
    const uint32_t last = u32_at(b + 48);
    for (int pair = 0; pair < 3; ++pair)
      use_32(
          160 + 32 * pair,
          [&](int i) __attribute__((always_inline)) {
            if (2 * pair + i / 16 < 5)
              return d * digits(unsigned_at(b + 32 + i % 16), IntVec{} + kPowers[2 * pair + i / 16]);
            IntVec bytes, power;
            for (int lane = 0; lane < kLanes; ++lane) {
              bytes[lane] = static_cast<int32_t>(last >> (i + lane) % 4 * 8 & 255);
              power[lane] = kPowers[(i + lane) % 16 / 4];
            }
            return d * digits(bytes, power);
          },
          use);
  }
};

// ---- blocks of numbers of one or two bits ----

// Bytes: d, 16 bytes of pairs of bits, four neighbours each. Value: d * (q - 1).
struct Q2_0 : BlockOf<DType::kQ2_0> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const float d = scale_at(b);
    for (int at = 0; at < 64; at += 32)
      use_32(
          at,
          [&](int i) __attribute__((always_inline)) {
            IntVec shift;
            for (int lane = 0; lane < kLanes; ++lane) shift[lane] = 2 * (i % 16 + lane);
            const int32_t sixteen = static_cast<int32_t>(u32_at(b + 2 + (at + i) / 16 * 4));
            return d * to_float(((IntVec{} + sixteen) >> shift & 3) - 1);
          },
          use);
  }
};

// Bytes: d, 128 bits. Value: d if the bit is set, or else -d.
struct Q1_0 : BlockOf<DType::kQ1_0> {
  template <typename Use>
  static inline void expand(const std::byte* b, const Use& use) {
    const Vec d = broadcast(scale_at(b));
    for (int at = 0; at < 128; at += 32)
      use_32(
          at, [&](int i) __attribute__((always_inline)) { return with_signs(d, ~u32_at(b + 2 + at / 8), i); },
          use);
  }
};

}  // namespace
}  // namespace thimble::cpu
