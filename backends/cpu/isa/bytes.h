// Vectors of bytes, four to a lane of vector.h, and what multiplies them with digits of x (digits.h).
#pragma once

#include "backends/cpu/isa/dequant.h"
#include "backends/cpu/isa/vector.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

// Whether this instruction set multiplies bytes.
#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__ARM_FEATURE_DOTPROD)
#define THIMBLE_BYTE_PRODUCTS
#endif

#ifdef THIMBLE_BYTE_PRODUCTS
namespace thimble::cpu {
namespace {

constexpr int kVectorBytes = 4 * kLanes;
typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes)));
typedef uint16_t BytePairs __attribute__((vector_size(kVectorBytes)));

inline Bytes load_bytes(const void* p) {
  Bytes v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
// 32 bytes, twice where a vector holds 64; `half` says which 16 where it holds no more.
inline Bytes load_32(const std::byte* p, int half = 0) {
#if defined(__AVX512F__)
  (void)half;
  return reinterpret_cast<Bytes>(
      _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
  return load_bytes(p + half * kVectorBytes);
#endif
}

// ---- bits ----

// Every byte's bits moved up by `first` places, or by `second` in the upper half of a vector of 64; down
// where these are negative. What comes in from a neighbour is left for the caller to mask.
template <int first, int second>
inline Bytes moved_bits(Bytes v) {
  const BytePairs pairs = reinterpret_cast<BytePairs>(v);
  constexpr bool kDown = first < 0 || second < 0;
  static_assert(!kDown || (first <= 0 && second <= 0));
  constexpr short kFirst = kDown ? -first : first;
  if constexpr (first == second) return reinterpret_cast<Bytes>(kDown ? pairs >> kFirst : pairs << kFirst);
#if defined(__AVX512F__)
  constexpr short kSecond = kDown ? -second : second;
  const __m512i places = _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(_mm256_set1_epi16(kFirst)),
                                                  _mm256_set1_epi16(kSecond), 1);
  return reinterpret_cast<Bytes>(kDown ? _mm512_srlv_epi16(reinterpret_cast<__m512i>(v), places)
                                       : _mm512_sllv_epi16(reinterpret_cast<__m512i>(v), places));
#endif
}

// Vector `k` of elements that are `bits` at a place in each of 32 bytes, bits that lie `step` higher for each
// 32 elements: moved to where `mask` is, the lowest place of it `to`.
template <int k, int step, int to, int mask>
inline Bytes bits_of_32(const std::byte* p) {
  constexpr int kGroup = k * kVectorBytes / 32, kNext = kVectorBytes == 64 ? kGroup + 1 : kGroup;
  return moved_bits<to - step * kGroup, to - step * kNext>(load_32(p, k % (32 / (kVectorBytes < 32 ? kVectorBytes : 32)))) &
         mask;
}

// Vector `k` of elements in runs: the low halves of `run` bytes, then their high halves, then those of the
// next ones.
template <int run, int k>
inline Bytes nibbles_of(const std::byte* p) {
  constexpr int kFirst = k * kVectorBytes, kIn = kFirst % (2 * run);
  p += kFirst / (2 * run) * run;
  if constexpr (kVectorBytes <= run) {
    const Bytes v = load_bytes(p + kIn % run);
    return kIn < run ? v & 15 : v >> 4;
  } else {
    static_assert(kVectorBytes == 2 * run);
#if defined(__AVX512F__)
    return moved_bits<0, -4>(load_32(p)) & 15;
#elif defined(__AVX2__)
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return reinterpret_cast<Bytes>(_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4))) & 15;
#endif
  }
}

// Vector `k` of blocks of 32 whose halves of 16 bytes lie there; the second pointer is for the second block
// of a vector of 64.
template <int k>
inline Bytes nibbles_of_blocks(const std::byte* first, const std::byte* second) {
#if defined(__AVX512F__)
  const auto at = [](const std::byte* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
  const __m512i twice = _mm512_mask_broadcast_i64x2(_mm512_maskz_broadcast_i64x2(0x0f, at(first)), 0xf0, at(second));
  return reinterpret_cast<Bytes>(
             _mm512_maskz_srlv_epi64(0xff, twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4))) &
         15;
#else
  (void)second;
  return nibbles_of<16, k % (32 / kVectorBytes)>(first);
#endif
}

// values[i] of each byte i < 16.
typedef int8_t ByteValues[16];
inline Bytes lookup_bytes(const ByteValues& values, Bytes i) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bytes>(_mm512_shuffle_epi8(
      _mm512_maskz_broadcast_i64x2(0xff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(values))),
      reinterpret_cast<__m512i>(i)));
#elif defined(__AVX2__)
  return reinterpret_cast<Bytes>(_mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values))),
      reinterpret_cast<__m256i>(i)));
#else
  return reinterpret_cast<Bytes>(vqtbl1q_s8(vld1q_s8(values), reinterpret_cast<uint8x16_t>(i)));
#endif
}

// ---- products ----

#if defined(__AVX512F__)
inline __m512i x_at(const int8_t* x) { return _mm512_loadu_si512(x); }
inline __m512i whole(Bytes v) { return reinterpret_cast<__m512i>(v); }
// Digits with the sign of signed numbers, and these without.
inline __m512i with_sign(__m512i x, Bytes w) {
  return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(whole(w)), _mm512_setzero_si512(), x);
}
inline Bytes without_sign(Bytes w) { return reinterpret_cast<Bytes>(_mm512_abs_epi8(whole(w))); }
#if !defined(__AVX512VNNI__)
inline __m512i products_of_pairs(Bytes w, __m512i x) { return _mm512_maddubs_epi16(whole(w), x); }
inline IntVec sums_of_pairs(__m512i pairs, short factor) {
  return reinterpret_cast<IntVec>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(factor)));
}
#endif
#elif defined(__AVX2__)
inline __m256i x_at(const int8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
inline __m256i whole(Bytes v) { return reinterpret_cast<__m256i>(v); }
inline __m256i with_sign(__m256i x, Bytes w) { return _mm256_sign_epi8(x, whole(w)); }
inline Bytes without_sign(Bytes w) { return reinterpret_cast<Bytes>(_mm256_abs_epi8(whole(w))); }
inline __m256i products_of_pairs(Bytes w, __m256i x) { return _mm256_maddubs_epi16(whole(w), x); }
inline IntVec sums_of_pairs(__m256i pairs, short factor) {
  return reinterpret_cast<IntVec>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(factor)));
}
#else
inline int8x16_t x_at(const int8_t* x) { return vld1q_s8(x); }
inline int8x16_t with_sign(int8x16_t x, Bytes) { return x; }
inline Bytes without_sign(Bytes w) { return w; }  // the instruction takes signed bytes
#endif
using DigitVec = decltype(x_at(nullptr));

inline IntVec times_255(IntVec v) { return (v << 8) - v; }

// Lane i is the sum of the products of bytes 4 i to 4 i + 3, plus lane i of `sum`. w is in [0, 128] and x in
// [-127, 127], so that two products fit 16 bits; on ARM w is in [-128, 127].
#if defined(__AVX512VNNI__)
inline IntVec add_products(IntVec sum, Bytes w, __m512i x) {
  return reinterpret_cast<IntVec>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), whole(w), x));
}
// 255 times the products with `high`, plus those with `low`.
inline IntVec products_of_two(Bytes w, DigitVec high, DigitVec low) {
  return add_products(times_255(add_products(IntVec{}, w, high)), w, low);
}
#elif defined(__AVX2__)
inline IntVec add_products(IntVec sum, Bytes w, DigitVec x) {
  return sum + sums_of_pairs(products_of_pairs(w, x), 1);
}
inline IntVec products_of_two(Bytes w, DigitVec high, DigitVec low) {
  return sums_of_pairs(products_of_pairs(w, high), 255) + sums_of_pairs(products_of_pairs(w, low), 1);
}
#else
inline IntVec add_products(IntVec sum, Bytes w, int8x16_t x) {
  return reinterpret_cast<IntVec>(
      vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(w), x));
}
inline IntVec products_of_two(Bytes w, DigitVec high, DigitVec low) {
  return add_products(times_255(add_products(IntVec{}, w, high)), w, low);
}
#endif

// ---- floats of groups ----

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));

inline Eight load_eight(const float* p) {
  Eight v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline Eight to_floats(EightHalves halves) {
#if defined(__F16C__)
  return reinterpret_cast<Eight>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(halves)));
#else
  Eight v;
  for (int i = 0; i < 8; ++i) v[i] = f16_to_f32(halves[i]);
  return v;
#endif
}

inline IntVec to_nearest(Vec v) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntVec>(_mm512_maskz_cvtps_epi32(0xffff, reinterpret_cast<__m512>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<IntVec>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(v)));
#else
  return reinterpret_cast<IntVec>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(v)));
#endif
}

// What the lanes of vector `k` of 256 elements are multiplied with: a float for each 32 or 16 of them.
template <int k, int group>
inline Vec lane_factors(const float* factors) {
#if defined(__AVX512F__)
  constexpr int kGroups = 64 / group, kFirst = k * kGroups;
  IntVec places;
  for (int i = 0; i < kLanes; ++i) places[i] = kFirst + i * kGroups / kLanes;
  if constexpr (group == 32) {
    const __m512 all = _mm512_castps256_ps512(_mm256_loadu_ps(factors));
    return reinterpret_cast<Vec>(
        _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(places), all));
  } else {
    return reinterpret_cast<Vec>(_mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(places),
                                                             _mm512_loadu_ps(factors)));
  }
#elif defined(__AVX2__)
  if constexpr (group == 32) return broadcast(factors[k]);
  return reinterpret_cast<Vec>(
      _mm256_blend_ps(_mm256_broadcast_ss(factors + 2 * k), _mm256_broadcast_ss(factors + 2 * k + 1), 0xf0));
#else
  return broadcast(factors[k * kVectorBytes / group]);
#endif
}

}  // namespace
}  // namespace thimble::cpu
#endif
