// Vectors of floats as wide as the instruction set that this file is compiled for.
//
// The files in isa/ are compiled several times with different instruction sets. They are therefore in a
// namespace with internal linkage and call no inline function from other files: the linker keeps one copy of
// such a function, possibly one that this processor cannot run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace thimble::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
// Vectors at any address that may alias floats.
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
inline Vec broadcast(float f) { return Vec{} + f; }

// kLanes 16-bit words as integers, at any address.
inline IntVec load_words(const void* p) {
  typedef uint16_t Words __attribute__((vector_size(2 * kLanes)));
  Words words;
  __builtin_memcpy(&words, p, sizeof words);
  return __builtin_convertvector(words, IntVec);
}
// kLanes halves as floats, at any address.
inline Vec load_halves(const void* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#else
  // As f16_to_f32() of base/bits.h, without branches.
  const IntVec h = load_words(p), sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
  const IntVec special = (magnitude >= 0x7c00) & 0x7f800000;  // infinity, NaN
  const Vec finite = reinterpret_cast<Vec>(magnitude << 13) * 0x1p112f;
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(finite) | special | sign);
#endif
}
inline Vec load(const uint16_t* p) { return load_halves(p); }

// Rotates lanes down by Step.
template <int Step, int... I>
inline Vec moved(Vec a, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, a, ((I + Step) % kLanes)...);
}
template <int Step = kLanes / 2>
inline float sum_lanes(Vec a) {
  if constexpr (Step == 0)
    return a[0];
  else
    return sum_lanes<Step / 2>(a + moved<Step>(a, std::make_integer_sequence<int, kLanes>()));
}

// a b + c, rounded once where the processor can. Left to clang, that would depend on the loop around it, and
// a row's bits on the number of rows.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// e^x with an error of at most 1.1 ulp (measured over all floats in [-87.3, 88.7]); 0 below -87.34, infinity
// above 88.72, NaN for NaN.
inline Vec exp(Vec x) {
  const Vec low = broadcast(-87.336544f), high = broadcast(88.722839f);
  Vec c = x < low ? low : x;  // NaN passes through, because every comparison with it is false
  c = c > high ? high : c;
  // x = n ln 2 + r. Adding 1.5 * 2^23 rounds to an integer. ln 2 is split in two parts; the product of n and
  // the first is exact.
  const Vec magic = broadcast(12582912.0f);
  const Vec shifted = c * 1.44269504f + magic;
  const Vec n = shifted - magic;
  const Vec r = (c - n * 0.693145752f) - n * 1.42860677e-6f;
  // Taylor series up to r^7; the remainder is below 2^-27 for |r| <= ln 2 / 2.
  Vec p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  // Multiply by 2^n in two steps, because 2^128 is not a float.
  const IntVec exponent = __builtin_convertvector(n, IntVec);
  const IntVec half = exponent >> 1;
  const Vec result =
      p * reinterpret_cast<Vec>((half + 127) << 23) * reinterpret_cast<Vec>((exponent - half + 127) << 23);
  return x < low ? Vec{} : x > high ? broadcast(__builtin_inff()) : result;
}

}  // namespace
}  // namespace thimble::cpu
