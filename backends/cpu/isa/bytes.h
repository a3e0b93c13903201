// Vectors of bytes, four to a lane of vector.h, and what multiplies them with digits of x (digits.h).
#pragma once

#include "backends/cpu/isa/dequant.h"
#include "backends/cpu/isa/vector.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

// Whether this instruction set multiplies bytes. AVX-512 without VNNI does so no faster than AVX2, whose set
// runs there, too.
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__ARM_FEATURE_DOTPROD)
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
  return moved_bits<to - step * kGroup, to - step * kNext>(
             load_32(p, k % (32 / (kVectorBytes < 32 ? kVectorBytes : 32)))) &
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
  const __m512i twice =
      _mm512_mask_broadcast_i64x2(_mm512_maskz_broadcast_i64x2(0x0f, at(first)), 0xf0, at(second));
  return reinterpret_cast<Bytes>(
             _mm512_maskz_srlv_epi64(0xff, twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4))) &
         15;
#else
  (void)second;
  return nibbles_of<16, k % (32 / kVectorBytes)>(first);
#endif
}

// values[i] of each byte i < 16.
typedef uint8_t ByteValues[16];
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
  return reinterpret_cast<Bytes>(vqtbl1q_u8(vld1q_u8(values), reinterpret_cast<uint8x16_t>(i)));
#endif
}

// ---- products ----

// Digits are of this base. AVX2 multiplies signed numbers by giving their signs to the digits, and -128 has
// no opposite among bytes: there digits are -127 to 127.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kBase = 255;
inline IntVec times_base(IntVec v) { return (v << 8) - v; }
#else
constexpr int kBase = 256;
inline IntVec times_base(IntVec v) { return v << 8; }
#endif

// add_products: lane i is the sum of the products of bytes 4 i to 4 i + 3, plus lane i of `sum`.
// products_of_two: kBase times the products with `high`, plus those with `low`.
#if defined(__AVX512F__)
using Digits = __m512i;
inline Digits load_digits(const int8_t* x) { return _mm512_loadu_si512(x); }
inline IntVec add_products(IntVec sum, Bytes w, Digits x) {
  return reinterpret_cast<IntVec>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w), x));
}
#elif defined(__AVX2__)
using Digits = __m256i;
inline Digits load_digits(const int8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
inline Digits with_signs_of(Bytes w, Digits x) { return _mm256_sign_epi8(x, reinterpret_cast<__m256i>(w)); }
inline Bytes without_signs(Bytes w) {
  return reinterpret_cast<Bytes>(_mm256_abs_epi8(reinterpret_cast<__m256i>(w)));
}
// Two products make at most 2 * 128 * 127: 16 bits are enough.
inline IntVec products(Bytes w, Digits x, short factor) {
  return reinterpret_cast<IntVec>(
      _mm256_madd_epi16(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(w), x), _mm256_set1_epi16(factor)));
}
inline IntVec add_products(IntVec sum, Bytes w, Digits x) { return sum + products(w, x, 1); }
inline IntVec products_of_two(Bytes w, Digits high, Digits low) {
  return products(w, high, kBase) + products(w, low, 1);
}
#else
using Digits = int8x16_t;
inline Digits load_digits(const int8_t* x) { return vld1q_s8(x); }
inline IntVec add_products(IntVec sum, Bytes w, Digits x) {
  return reinterpret_cast<IntVec>(
      vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(w), x));
}
#endif
#if !defined(__AVX2__) || defined(__AVX512F__)
inline IntVec products_of_two(Bytes w, Digits high, Digits low) {
  return add_products(times_base(add_products(IntVec{}, w, high)), w, low);
}
#endif

// ---- a float for each group of 256 elements ----

// For groups of 32.
typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));
// For groups of 16.
struct Sixteen {
  Vec parts[16 / kLanes];
};

inline void load_floats(const float* p, Eight& v) { __builtin_memcpy(&v, p, sizeof v); }
inline void load_floats(const float* p, Sixteen& v) {
  for (int i = 0; i < 16; i += kLanes) v.parts[i / kLanes] = load(p + i);
}
inline void store_floats(float* p, Eight v) { __builtin_memcpy(p, &v, sizeof v); }
inline void store_floats(float* p, const Sixteen& v) {
  for (int i = 0; i < 16; i += kLanes) store(p + i, v.parts[i / kLanes]);
}
inline Sixteen operator*(const Sixteen& a, const Sixteen& b) {
  Sixteen c;
  for (int i = 0; i < 16 / kLanes; ++i) c.parts[i] = a.parts[i] * b.parts[i];
  return c;
}
inline void add_product(Eight& sum, Eight a, Eight b) { sum += a * b; }
inline void add_product(Sixteen& sum, const Sixteen& a, const Sixteen& b) {
  for (int i = 0; i < 16 / kLanes; ++i) sum.parts[i] += a.parts[i] * b.parts[i];
}
inline float sum_floats(Eight v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }
inline float sum_floats(const Sixteen& v) {
  Vec sum = v.parts[0];
  for (int i = 1; i < 16 / kLanes; ++i) sum += v.parts[i];
  return sum_lanes(sum);
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
// Eight bytes without sign, the lowest first.
inline Eight bytes_to_floats(uint64_t bytes) {
#if defined(__AVX2__)
  return reinterpret_cast<Eight>(
      _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)))));
#else
  typedef uint8_t EightBytes __attribute__((vector_size(8)));
  return __builtin_convertvector(reinterpret_cast<EightBytes>(bytes), Eight);
#endif
}

// What the lanes of a vector are multiplied with.
template <typename Floats>
class LaneFactors {
 public:
  static constexpr int kGroups = sizeof(Floats) / sizeof(float), kGroup = 256 / kGroups;

#if defined(__AVX512F__)
  void set(Eight v) { all_ = _mm512_castps256_ps512(reinterpret_cast<__m256>(v)); }
  void set(const Sixteen& v) { all_ = reinterpret_cast<__m512>(v.parts[0]); }
  // Those of vector k of 256 elements.
  template <int k>
  Vec at() const {
    IntVec places;
    for (int i = 0; i < kLanes; ++i) places[i] = (64 * k + 4 * i) / kGroup;
    return reinterpret_cast<Vec>(
        _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(places), all_));
  }

 private:
  __m512 all_;
#else
  void set(const Floats& v) {
    store_floats(all_, v);
    keep_in_memory(all_);
  }
  template <int k>
  Vec at() const {
    constexpr int kFirst = k * kVectorBytes / kGroup;
#if defined(__AVX2__)
    const __m256 first = _mm256_broadcast_ss(all_ + kFirst);
    if constexpr (kGroup == 32) return reinterpret_cast<Vec>(first);
    return reinterpret_cast<Vec>(
        _mm256_blend_ps(first, _mm256_broadcast_ss(all_ + (kFirst + 1) % kGroups), 0xf0));
#else
    return broadcast(all_[kFirst]);
#endif
  }

 private:
  alignas(32) float all_[kGroups];
#endif
};

inline IntVec to_nearest(Vec v) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntVec>(_mm512_maskz_cvtps_epi32(0xffff, reinterpret_cast<__m512>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<IntVec>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(v)));
#else
  return reinterpret_cast<IntVec>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(v)));
#endif
}

}  // namespace
}  // namespace thimble::cpu
#endif
