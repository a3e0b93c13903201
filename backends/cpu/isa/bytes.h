// Vectors of bytes, four per lane of vector.h, and the instructions that multiply them with digits of x
// (digits.h).
#pragma once

#include "backends/cpu/isa/dequant.h"
#include "backends/cpu/isa/vector.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

// Whether this instruction set multiplies bytes. AVX-512 without VNNI is not faster at it than AVX2, so
// processors with the former use the AVX2 kernels.
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__ARM_FEATURE_DOTPROD)
#define THIMBLE_BYTE_PRODUCTS
#endif
// AVX2 alone has no instruction that adds products of bytes to integers.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define THIMBLE_PAIRS_OF_PRODUCTS
#endif

#ifdef THIMBLE_BYTE_PRODUCTS
namespace thimble::cpu {
namespace {

constexpr int kVectorBytes = 4 * kLanes;
typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes)));

inline Bytes load_bytes(const void* p) {
  Bytes v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// ---- the order of elements ----

// A vector holds a run of elements of each of kVectorGroups groups of 32 elements; kSets sets of vectors
// cover the groups in turn. The kTogether vectors of a set hold all elements of its groups; the first vector
// holds the first run of each. A lane belongs to the same group in all of them, so its products are added as
// integers. Longer integer sums are worth the extra shuffles only on x86; on Arm a run is contiguous in
// memory.
#if defined(__AVX2__)
constexpr int kRun = 8;
#else
constexpr int kRun = 16;
#endif
constexpr int kVectorGroups = kVectorBytes / kRun, kTogether = 32 / kRun, kSets = 8 / kVectorGroups;
struct Together {
  Bytes of[kTogether];
};
#if defined(__AVX512F__)  // two vectors, each with runs of 16 of four groups, are shuffled together
constexpr int group_of(int, int run) { return run / 2 + run % 2 * 4; }
constexpr int run_of(int group) { return group % 4 * 2 + group / 4; }
#else
constexpr int group_of(int set, int run) { return set + kSets * run; }
constexpr int run_of(int group) { return group / kSets; }
#endif
// The vector that holds element i of 256.
constexpr int vector_of(int i) { return i / 32 % kSets * kTogether + i % 32 / kRun; }
constexpr int place_of(int i) { return run_of(i / 32) * kRun + i % kRun; }

#if defined(__AVX512F__)
inline __m512i load_64(const std::byte* p) { return _mm512_loadu_si512(p); }
typedef short WordIndices __attribute__((vector_size(64)));
typedef int64_t QuadIndices __attribute__((vector_size(64)));
inline __m512i words_of(__m512i a, __m512i b, WordIndices i) {
  return _mm512_permutex2var_epi16(a, reinterpret_cast<__m512i>(i), b);
}
inline __m512i quads_of(__m512i a, __m512i b, QuadIndices i) {
  return _mm512_permutex2var_epi64(a, reinterpret_cast<__m512i>(i), b);
}
// The first or last 8 bytes of each 16 of a, interleaved with those of b.
inline Bytes first_runs(__m512i a, __m512i b) {
  return reinterpret_cast<Bytes>(_mm512_maskz_unpacklo_epi64(0xff, a, b));
}
inline Bytes last_runs(__m512i a, __m512i b) {
  return reinterpret_cast<Bytes>(_mm512_maskz_unpackhi_epi64(0xff, a, b));
}

// Loads 16 bytes at offset kAt of four blocks out of eight, from block kFirst on; a block has kBytes bytes.
template <int kFirst, int kBytes, int kAt>
inline __m512i quarters_of_blocks(const std::byte* b) {
  constexpr int kBegin = kFirst * kBytes + kAt, kEnd = 8 * kBytes, kNext = kBegin + kBytes;
  if constexpr (2 * kBytes + 16 <= 64) {
    // Takes every other block from two loads of 64 bytes each, which must not pass the end of the eighth
    // block.
    constexpr int kSecond = kNext < kEnd - 64 ? kNext : kEnd - 64;
    static_assert(kBegin + 64 <= kEnd && (kNext - kSecond) % 2 == 0);
    WordIndices words;
    for (int i = 0; i < 32; ++i) {
      const int at = i / 16 * 2 * kBytes + (i / 8 % 2 ? kNext - kSecond + 64 : 0);
      words[i] = static_cast<short>(at / 2 + i % 8);
    }
    return words_of(load_64(b + kBegin), load_64(b + kSecond), words);
  } else {
    // For q8_0, overlapping loads of 64 bytes are slower if they miss the caches (21 GB/s instead of 34).
    const auto at = [&](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + kBegin + i * kBytes));
    };
    __m512i v = _mm512_maskz_broadcast_i64x2(0xff, at(0));
    v = _mm512_mask_broadcast_i64x2(v, 0x0c, at(1));
    v = _mm512_mask_broadcast_i64x2(v, 0x30, at(2));
    return _mm512_mask_broadcast_i64x2(v, 0xc0, at(3));
  }
}
#elif defined(__AVX2__)
inline Bytes first_runs(Bytes a, Bytes b) {
  return reinterpret_cast<Bytes>(
      _mm256_unpacklo_epi64(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
inline Bytes last_runs(Bytes a, Bytes b) {
  return reinterpret_cast<Bytes>(
      _mm256_unpackhi_epi64(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
// A set in runs of 16 in memory order: the first 16 elements of its first and third group, those of its
// second and fourth, then the last 16 elements of the same groups.
struct LongRuns {
  Bytes of[4];
  operator Together() const {
    return {first_runs(of[0], of[1]), last_runs(of[0], of[1]), first_runs(of[2], of[3]),
            last_runs(of[2], of[3])};
  }
};
// Loads runs of 16 bytes at p and p + kStep.
template <int kStep>
inline Bytes load_long_runs(const std::byte* p) {
  const auto at = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i)); };
  if constexpr (kStep == 0) return reinterpret_cast<Bytes>(_mm256_broadcastsi128_si256(at(0)));
  return reinterpret_cast<Bytes>(_mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(kStep), 1));
}
#endif

// Moves byte places[i] of 16 bytes to byte i; each half or quarter of a longer vector by itself.
inline Bytes shuffled(Bytes v, Bytes places) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bytes>(
      _mm512_shuffle_epi8(reinterpret_cast<__m512i>(v), reinterpret_cast<__m512i>(places)));
#elif defined(__AVX2__)
  return reinterpret_cast<Bytes>(
      _mm256_shuffle_epi8(reinterpret_cast<__m256i>(v), reinterpret_cast<__m256i>(places)));
#else
  return reinterpret_cast<Bytes>(
      vqtbl1q_u8(reinterpret_cast<uint8x16_t>(v), reinterpret_cast<uint8x16_t>(places)));
#endif
}

// Loads the groups of set kSet of eight blocks of 32 as bytes. Blocks have kBytes bytes; elements begin at
// offset kAt.
template <int kSet, int kBytes, int kAt>
inline Together bytes_of_blocks(const std::byte* b) {
#if defined(__AVX512F__)
  const __m512i begin = quarters_of_blocks<0, kBytes, kAt>(b),
                begin_of_last = quarters_of_blocks<4, kBytes, kAt>(b),
                end = quarters_of_blocks<0, kBytes, kAt + 16>(b),
                end_of_last = quarters_of_blocks<4, kBytes, kAt + 16>(b);
  return {first_runs(begin, begin_of_last), last_runs(begin, begin_of_last), first_runs(end, end_of_last),
          last_runs(end, end_of_last)};
#elif defined(__AVX2__)
  const auto runs = [&](int group, int at) { return load_long_runs<4 * kBytes>(b + group * kBytes + at); };
  return LongRuns{runs(kSet, kAt), runs(kSet + 2, kAt), runs(kSet, kAt + 16), runs(kSet + 2, kAt + 16)};
#else
  constexpr int kBegin = kSet * kBytes + kAt;
  return {load_bytes(b + kBegin), load_bytes(b + kBegin + 16)};
#endif
}
// The same for elements stored as nibbles; the low nibbles are the first 16 elements.
template <int kSet, int kBytes, int kAt>
inline Together nibbles_of_blocks(const std::byte* b) {
#if defined(__AVX512F__)
  __m512i first, last;
  if constexpr (kBytes == 16) {
    first = load_64(b + kAt);
    last = load_64(b + kAt + 64);
  } else {
    first = quarters_of_blocks<0, kBytes, kAt>(b);
    last = quarters_of_blocks<4, kBytes, kAt>(b);
  }
  const Bytes v = first_runs(first, last), w = last_runs(first, last);
  return {v & 15, w & 15, v >> 4, w >> 4};
#elif defined(__AVX2__)
  const auto runs = [&](int group) { return load_long_runs<4 * kBytes>(b + group * kBytes + kAt); };
  const Bytes v = first_runs(runs(kSet), runs(kSet + 2)), w = last_runs(runs(kSet), runs(kSet + 2));
  return {v & 15, w & 15, v >> 4, w >> 4};
#else
  const Bytes v = load_bytes(b + kSet * kBytes + kAt);
  return {v & 15, v >> 4};
#endif
}

// Loads groups whose bits are stored in 32 bytes that several groups share. The bits of group g begin at byte
// Places::at(g) and are shifted up by Places::down(g), or down if that is negative. The mask selects these
// bits.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <int kDown>
inline Bytes down_by(Bytes v) {
  if constexpr (kDown < 0)
    return reinterpret_cast<Bytes>(_mm256_slli_epi64(reinterpret_cast<__m256i>(v), -kDown));
  else
    return reinterpret_cast<Bytes>(_mm256_srli_epi64(reinterpret_cast<__m256i>(v), kDown));
}
// The same for groups g and g + 4.
template <typename Places, int g, uint8_t mask>
inline Bytes bits_of_two(const std::byte* b) {
  constexpr int kApart = Places::down(g + 4) - Places::down(g);
  Bytes v = load_long_runs<Places::at(g + 4) - Places::at(g)>(b + Places::at(g));
  if constexpr (kApart > 0)  // equal for all g
    v = reinterpret_cast<Bytes>(
        _mm256_srlv_epi64(reinterpret_cast<__m256i>(v), _mm256_setr_epi64x(0, 0, kApart, kApart)));
  return down_by<Places::down(g)>(v) & mask;
}
template <typename Places, int set, uint8_t mask>
inline LongRuns bits_of_groups(const std::byte* b) {
  return {bits_of_two<Places, set, mask>(b), bits_of_two<Places, set + 2, mask>(b),
          bits_of_two<Places, set, mask>(b + 16), bits_of_two<Places, set + 2, mask>(b + 16)};
}
inline LongRuns operator|(const LongRuns& a, const LongRuns& b) {
  return {a.of[0] | b.of[0], a.of[1] | b.of[1], a.of[2] | b.of[2], a.of[3] | b.of[3]};
}
#else
// Vector `t` of set `set`.
template <typename Places, int set, int t, uint8_t mask>
inline Bytes bits_of(const std::byte* b) {
#if defined(__AVX512F__)
  QuadIndices from, down;
  for (int i = 0; i < 8; ++i) {
    from[i] = Places::at(group_of(set, i)) / 8 + t;
    down[i] = Places::down(group_of(set, i));
  }
  __m512i v;
  if constexpr (Places::at(7) == 0) {
    long long quad;
    __builtin_memcpy(&quad, b + 8 * t, sizeof quad);
    v = _mm512_set1_epi64(quad);
  } else if constexpr (Places::at(7) < 64) {
    v = _mm512_maskz_permutexvar_epi64(0xff, reinterpret_cast<__m512i>(from), load_64(b));
  } else {
    v = quads_of(load_64(b), load_64(b + 64), from);
  }
  // A rotation is enough, because bits that it brings in from the other end are masked.
  return reinterpret_cast<Bytes>(_mm512_maskz_rorv_epi64(0xff, v, reinterpret_cast<__m512i>(down))) & mask;
#else
  constexpr int kDown = Places::down(set);
  const Bytes v = load_bytes(b + Places::at(set) + 16 * t);
  if constexpr (kDown < 0)
    return v << -kDown & mask;
  else
    return v >> kDown & mask;
#endif
}
template <typename Places, int set, uint8_t mask, int... t>
inline Together bits_of_vectors(const std::byte* b, std::integer_sequence<int, t...>) {
  return {bits_of<Places, set, t, mask>(b)...};
}
template <typename Places, int set, uint8_t mask>
inline Together bits_of_groups(const std::byte* b) {
  return bits_of_vectors<Places, set, mask>(b, std::make_integer_sequence<int, kTogether>());
}
inline Together operator|(const Together& a, const Together& b) {
  Together v;
  for (int t = 0; t < kTogether; ++t) v.of[t] = a.of[t] | b.of[t];
  return v;
}
#endif

// Loads the groups of set kSet of four blocks of nvfp4 as bytes. Blocks have 36 bytes, with four scales
// before the nibbles; the low nibbles of eight bytes are eight elements, the high nibbles the next eight.
template <int kSet>
inline Together nibbles_of_nvfp4(const std::byte* b) {
#if defined(__AVX512F__)
  const auto two_blocks = [&](int first) {
    const auto of = [&](int block) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 36 * block + 4));
    };
    return _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(of(first)), of(first + 1), 1);
  };
  const __m512i first = two_blocks(0), last = two_blocks(2);
  const Bytes v = first_runs(first, last), w = last_runs(first, last);
  return {v & 15, v >> 4, w & 15, w >> 4};
#elif defined(__AVX2__)
  const auto runs = [&](int group) { return load_long_runs<72>(b + group / 2 * 36 + 4 + group % 2 * 16); };
  const Bytes v = first_runs(runs(kSet), runs(kSet + 2)), w = last_runs(runs(kSet), runs(kSet + 2));
  return {v & 15, v >> 4, w & 15, w >> 4};
#else
  const uint64x2_t v =
      vreinterpretq_u64_u8(reinterpret_cast<uint8x16_t>(load_bytes(b + kSet / 2 * 36 + 4 + kSet % 2 * 16)));
  const uint8x16_t first = vreinterpretq_u8_u64(vzip1q_u64(v, v)),
                   last = vreinterpretq_u8_u64(vzip2q_u64(v, v));
  const int8x16_t down = vcombine_s8(vdup_n_s8(0), vdup_n_s8(-4));
  return {reinterpret_cast<Bytes>(vshlq_u8(first, down)) & 15,
          reinterpret_cast<Bytes>(vshlq_u8(last, down)) & 15};
#endif
}
// The scales of four blocks of nvfp4: four bytes each.
inline Words scales_of_nvfp4(const std::byte* b) {
  return Words{u32_at(b), u32_at(b + 36), u32_at(b + 72), u32_at(b + 108)};
}

// Loads the groups of set kSet of two blocks of q1_0 as bytes, which are 0 or 2. Blocks have 18 bytes, and
// the bits begin after two.
template <int kSet>
inline Together bits_of_q1_0(const std::byte* b) {
  Bytes bits;  // of each half of 16 bytes, or of all, so that a shuffle can move each byte to its run
  const auto place = [](int t, int i) {
#if defined(__AVX512F__)
    return (i % 16 < 8 ? 0 : 4) + t;
#elif defined(__AVX2__)
    return 4 * (kSet + (i % 16 < 8 ? 0 : 2)) + t;
#else
    return 4 * (kSet % 4) + 2 * t + i / 8;
#endif
  };
#if defined(__AVX512F__)
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 2)),
                last = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 20));
  const __m256i words =
      _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi32(first, last)),
                              _mm_unpackhi_epi32(first, last), 1);  // of each group and the one 4 after it
  bits = reinterpret_cast<Bytes>(_mm512_maskz_permutexvar_epi64(
      0xff, _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), _mm512_castsi256_si512(words)));
#elif defined(__AVX2__)
  bits = load_long_runs<18>(b + 2);
#else
  bits = load_bytes(b + 2 + kSet / 4 * 18);
#endif
  Bytes bit;
  for (int i = 0; i < kVectorBytes; ++i) bit[i] = static_cast<uint8_t>(1 << i % 8);
  Together v;
  for (int t = 0; t < kTogether; ++t) {
    Bytes places;
    for (int i = 0; i < kVectorBytes; ++i) places[i] = static_cast<uint8_t>(place(t, i));
    v.of[t] = reinterpret_cast<Bytes>((shuffled(bits, places) & bit) == bit) & 2;
  }
  return v;
}

// Loads the groups of set kSet of four blocks of q2_0 as bytes. Blocks have 18 bytes, and the pairs of bits
// begin after two.
template <int kSet>
inline Together pairs_of_q2_0(const std::byte* b) {
  // Four pairs from each of kVectorBytes / 4 bytes, which are the low bytes of words.
  const auto spread = [](auto words) {
    typedef uint32_t Wide __attribute__((vector_size(kVectorBytes)));
    Wide w = reinterpret_cast<Wide>(words);
    w |= w << 6;
    w |= w << 12;
    return reinterpret_cast<Bytes>(w & 0x03030303);
  };
#if defined(__AVX512F__)
  // Two bytes of each group for each vector, in the order of its runs.
  WordIndices words;
  for (int i = 0; i < 32; ++i) {
    const int group = group_of(kSet, i % 8), at = group / 2 * 9 + 1 + group % 2 * 4 + i / 8;
    words[i] = static_cast<short>(at < 32 ? at : at - 4 + 32);
  }
  const __m512i all = words_of(load_64(b), load_64(b + 8), words);
#define THIMBLE_SPREAD(t) \
  spread(_mm512_maskz_cvtepu8_epi32(0xffff, _mm512_maskz_extracti32x4_epi32(15, all, t)))
  return {THIMBLE_SPREAD(0), THIMBLE_SPREAD(1), THIMBLE_SPREAD(2), THIMBLE_SPREAD(3)};
#undef THIMBLE_SPREAD
#elif defined(__AVX2__)
  const auto group = [&](int block) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b + 18 * block + 2 + 8 * kSet));
  };
  const __m128i first = _mm_unpacklo_epi16(group(0), group(1)), last = _mm_unpacklo_epi16(group(2), group(3)),
                begin = _mm_unpacklo_epi32(first, last), end = _mm_unpackhi_epi32(first, last);
  const auto vector = [&](__m128i bytes) { return spread(_mm256_cvtepu8_epi32(bytes)); };
  return {vector(begin), vector(_mm_srli_si128(begin, 8)), vector(end), vector(_mm_srli_si128(end, 8))};
#else
  const auto vector = [&](int t) {
    return spread(unsigned_at(b + kSet / 2 * 18 + 2 + 8 * (kSet % 2) + 4 * t));
  };
  return {vector(0), vector(1)};
#endif
}

// Looks up values[i] for each byte i < 16.
typedef uint8_t ByteValues[16];
inline Bytes lookup_bytes(const ByteValues& values, Bytes i) {
#if defined(__AVX512F__)
  const __m512i all =
      _mm512_maskz_broadcast_i64x2(0xff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
#elif defined(__AVX2__)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
#else
  const Bytes all = load_bytes(values);
#endif
  return shuffled(reinterpret_cast<Bytes>(all), i);
}

// ---- products ----

inline IntVec times_256(IntVec v) { return v << 8; }

// add_products: lane i is the sum of the products of bytes 4 i to 4 i + 3 of n vectors, plus lane i of `sum`.
// products_of_two: 256 times the products with `high`, plus the products with `low`.
#if defined(__AVX512F__)
using Digits = __m512i;
inline Digits load_digits(const int8_t* x) { return _mm512_loadu_si512(x); }
inline IntVec add_product(IntVec sum, Bytes w, Digits x) {
  return reinterpret_cast<IntVec>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w), x));
}
#elif defined(__AVX2__)
using Digits = __m256i;
inline Digits load_digits(const int8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
#ifdef THIMBLE_PAIRS_OF_PRODUCTS
// Fits 16 bits: two products in each of two vectors of bytes below 64, or of four below 32, are at most 2 * 2
// * 63 * 128.
template <int n>
inline IntVec products(const Bytes* w, const Digits (&x)[n], short factor) {
  __m256i sum = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(w[0]), x[0]);
  for (int i = 1; i < n; ++i)
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(reinterpret_cast<__m256i>(w[i]), x[i]));
  return reinterpret_cast<IntVec>(_mm256_madd_epi16(sum, _mm256_set1_epi16(factor)));
}
template <int n>
inline IntVec add_products(IntVec sum, const Bytes* w, const Digits (&x)[n]) {
  return sum + products(w, x, 1);
}
template <int n>
inline IntVec products_of_two(const Bytes* w, const Digits (&high)[n], const Digits (&low)[n]) {
  return products(w, high, 256) + products(w, low, 1);
}
// Signed bytes times 16-bit digits (DigitBlock::words), in n vectors. A byte occupies the upper half of a
// word: 4 * 4 products of 2^15 and 2^11.
template <int n>
inline Vec products_of_words(const Bytes* w, const int16_t* x) {
  IntVec high = {}, low = {};
  const auto of_digit = [&](__m256i words, int i) {
    return reinterpret_cast<IntVec>(
        _mm256_madd_epi16(words, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16 * i))));
  };
  for (int i = 0; i < n; ++i) {
    const __m256i even = _mm256_slli_epi16(reinterpret_cast<__m256i>(w[i]), 8),
                  odd = _mm256_and_si256(reinterpret_cast<__m256i>(w[i]), _mm256_set1_epi16(-256));
    high += of_digit(even, 4 * i) + of_digit(odd, 4 * i + 2);
    low += of_digit(even, 4 * i + 1) + of_digit(odd, 4 * i + 3);
  }
  return __builtin_convertvector(high, Vec) * (4096.0f / 256) +
         __builtin_convertvector(low, Vec) * (1.0f / 256);
}
// Stores the digits of eight elements from i on.
inline void put_words(IntVec v, int i, int16_t* to) {
  const IntVec high = (v + 2048) >> 12, low = v - (high << 12);
  const __m256i words = _mm256_packs_epi32(reinterpret_cast<__m256i>(high), reinterpret_cast<__m256i>(low)),
                pairs =
                    _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                                   0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15))),
                quads = _mm256_permutevar8x32_epi32(pairs, _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
  // High digits of even elements, their low digits, and the same of odd elements.
  int64_t parts[4];
  __builtin_memcpy(parts, &quads, sizeof parts);
  to += 64 * vector_of(i) + place_of(i) / 2;
  for (int part = 0; part < 4; ++part) __builtin_memcpy(to + 16 * part, &parts[part], 8);
}
#else
inline IntVec add_product(IntVec sum, Bytes w, Digits x) {
  return reinterpret_cast<IntVec>(
      _mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(w), x));
}
#endif
#else
using Digits = int8x16_t;
inline Digits load_digits(const int8_t* x) { return vld1q_s8(x); }
inline IntVec add_product(IntVec sum, Bytes w, Digits x) {
  return reinterpret_cast<IntVec>(
      vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(w), x));
}
#endif
#ifndef THIMBLE_PAIRS_OF_PRODUCTS
template <int n>
inline IntVec add_products(IntVec sum, const Bytes* w, const Digits (&x)[n]) {
  for (int i = 0; i < n; ++i) sum = add_product(sum, w[i], x[i]);
  return sum;
}
template <int n>
inline IntVec products_of_two(const Bytes* w, const Digits (&high)[n], const Digits (&low)[n]) {
  return add_products(times_256(add_products(IntVec{}, w, high)), w, low);
}
#endif

// ---- one float per group of 256 elements ----

// For groups of 32 elements.
typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));
// For groups of 16 elements.
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
// Subtracts the products of a and b from lanes of a sum; which lanes does not matter.
inline void take_off(Vec& sum, Eight a, Eight b) {
#if defined(__AVX512F__)
  const auto lanes = [](Eight v) { return _mm512_castps256_ps512(reinterpret_cast<__m256>(v)); };
  sum = reinterpret_cast<Vec>(
      _mm512_mask3_fnmadd_ps(lanes(a), lanes(b), reinterpret_cast<__m512>(sum), 0x00ff));
#elif defined(__AVX2__)
  sum -= a * b;
#else
  const Eight products = a * b;
  sum -= __builtin_shufflevector(products, products, 0, 1, 2, 3);
  sum -= __builtin_shufflevector(products, products, 4, 5, 6, 7);
#endif
}
inline void take_off(Vec& sum, const Sixteen& a, const Sixteen& b) {
  for (int i = 0; i < 16 / kLanes; ++i) sum -= a.parts[i] * b.parts[i];
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
// The half at p in all lanes.
inline Eight eight_of_half(const std::byte* p) {
  return to_floats(EightHalves{} + static_cast<uint16_t>(u16_at(p)));
}

// The half at offset kAt of each of eight blocks.
template <int kBytes, int kAt>
inline EightHalves halves_of_blocks(const std::byte* b) {
#if defined(__AVX512F__)
  static_assert(kAt % 2 == 0 && kBytes % 2 == 0);
  if constexpr (7 * kBytes + kAt + 2 <= 128) {
    WordIndices words = {};
    for (int i = 0; i < 8; ++i) words[i] = static_cast<short>((i * kBytes + kAt) / 2);
    typedef uint16_t Halves __attribute__((vector_size(64)));
    const Halves v = reinterpret_cast<Halves>(words_of(load_64(b), load_64(b + 64), words));
    return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  }
#endif
#if defined(__AVX2__)
  const auto four = [&](int i) {
    uint64_t v = 0;
    for (int k = 0; k < 4; ++k) v |= static_cast<uint64_t>(u16_at(b + (i + k) * kBytes + kAt)) << 16 * k;
    return static_cast<long long>(v);
  };
  // We avoid _mm_set_epi64x(), because gcc 12 would then shift and join both halves in vectors.
  return reinterpret_cast<EightHalves>(_mm_insert_epi64(_mm_cvtsi64_si128(four(0)), four(4), 1));
#else
  const auto of = [&](int i) { return static_cast<uint16_t>(u16_at(b + i * kBytes + kAt)); };
  return EightHalves{of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)};
#endif
}
// Moves an exponent byte of each block to the exponent field of a float.
template <int kBytes>
inline EightInts first_bytes_of_blocks(const std::byte* b) {
#if defined(__AVX512F__)
  // An odd stride puts the byte of every other block into the high byte of a word
  static_assert(kBytes % 2 == 1 && 7 * kBytes < 128);
  WordIndices words = {};
  for (int i = 0; i < 16; ++i) words[i] = static_cast<short>(i / 2 * kBytes / 2);
  const WordIndices twice = reinterpret_cast<WordIndices>(words_of(load_64(b), load_64(b + 64), words));
  const EightInts v = reinterpret_cast<EightInts>(
      __builtin_shufflevector(twice, twice, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  return v << EightInts{8, 0, 8, 0, 8, 0, 8, 0} >> 1 & 0x7f800000;
#elif defined(__AVX2__)
  uint64_t v = 0;
  for (int i = 0; i < 8; ++i) v |= static_cast<uint64_t>(b[i * kBytes]) << 8 * i;
  return reinterpret_cast<EightInts>(
      _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(v))), 23));
#else
  const auto of = [&](int i) { return static_cast<int32_t>(b[i * kBytes]) << 23; };
  return EightInts{of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)};
#endif
}

// The scales and minima of the 8 groups of q4_K and q5_K, times d and m, packed as GroupScales describes.
struct PackedGroups {
  Eight scales, minima;
#if defined(__AVX512F__)
  explicit PackedGroups(const std::byte* b) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    // The two lowest bytes of a lane: one holds the scale or minimum, or its low half, the other its top
    // bits.
    const auto lane = [](int low, int top) { return low | (top < 0 ? 128 : top) << 8 | int(0x80800000); };
    const IntVec places = {lane(4, -1), lane(5, -1), lane(6, -1),  lane(7, -1), lane(12, 4),  lane(13, 5),
                           lane(14, 6), lane(15, 7), lane(8, -1),  lane(9, -1), lane(10, -1), lane(11, -1),
                           lane(12, 8), lane(13, 9), lane(14, 10), lane(15, 11)};
    const IntVec both = reinterpret_cast<IntVec>(
        _mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xffff, bytes), reinterpret_cast<__m512i>(places)));
    const IntVec down = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4},
                 mask = {63, 63, 63, 63, 15, 15, 15, 15, 63, 63, 63, 63, 15, 15, 15, 15};
    const Vec packed = to_float((both >> down & mask) | (both >> 10 & 48));
    const EightHalves words = reinterpret_cast<EightHalves>(bytes);
    const Vec factors = reinterpret_cast<Vec>(
        _mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(__builtin_shufflevector(
                                          words, words, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1))));
    const Vec all = packed * factors;
    scales = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7);
    minima = __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
  }
#else
  explicit PackedGroups(const std::byte* b) {
    const uint32_t low = u32_at(b + 4), middle = u32_at(b + 8), high = u32_at(b + 12);
    const auto both = [](uint32_t first, uint32_t last) { return first | static_cast<uint64_t>(last) << 32; };
    const uint64_t bytes[] = {
        both(low & 0x3f3f3f3f, (high & 0x0f0f0f0f) | (low >> 2 & 0x30303030)),
        both(middle & 0x3f3f3f3f, (high >> 4 & 0x0f0f0f0f) | (middle >> 2 & 0x30303030))};
#if defined(__AVX2__)
    const __m256 factors = _mm256_cvtph_ps(_mm_set1_epi32(static_cast<int>(u32_at(b))));
    scales = reinterpret_cast<Eight>(_mm256_moveldup_ps(factors)) * bytes_to_floats(bytes[0]);
    minima = reinterpret_cast<Eight>(_mm256_movehdup_ps(factors)) * bytes_to_floats(bytes[1]);
#else
    scales = scale_at(b) * bytes_to_floats(bytes[0]);
    minima = scale_at(b + 2) * bytes_to_floats(bytes[1]);
#endif
  }

 private:
  // Eight unsigned bytes as floats, lowest byte first.
  static Eight bytes_to_floats(uint64_t bytes) {
#if defined(__AVX2__)
    return reinterpret_cast<Eight>(
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)))));
#else
    typedef uint8_t EightBytes __attribute__((vector_size(8)));
    return __builtin_convertvector(reinterpret_cast<EightBytes>(bytes), Eight);
#endif
  }
#endif
};

// The factors for the lanes of a vector.
template <typename Floats>
class LaneFactors {
 public:
  static constexpr int kGroups = sizeof(Floats) / sizeof(float);
  // at<k>() is the factor for set k, or for the first or last 16 elements of a set's groups; place<k>(run) is
  // the factor for one of its runs.
  template <int k>
  static constexpr int place(int run) {
    return kGroups == 8 ? group_of(k, run) : 2 * group_of(k / 2, run) + k % 2;
  }

#if defined(__AVX512F__)
  void set(Eight v) { all_ = _mm512_castps256_ps512(reinterpret_cast<__m256>(v)); }
  void set(const Sixteen& v) { all_ = reinterpret_cast<__m512>(v.parts[0]); }
  template <int k>
  Vec at() const {
    IntVec places;
    for (int i = 0; i < kLanes; ++i) places[i] = place<k>(4 * i / kRun);
    return reinterpret_cast<Vec>(
        _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(places), all_));
  }

 private:
  __m512 all_;
#elif defined(__AVX2__)
  // Stores sixteen factors in the order of every other two runs, so that four of them are in order within
  // halves of vectors.
  void set(Eight v) { all_[0] = reinterpret_cast<__m256>(v); }
  void set(const Sixteen& v) {
    const __m256 first = reinterpret_cast<__m256>(v.parts[0]), last = reinterpret_cast<__m256>(v.parts[1]);
    all_[0] = _mm256_permute2f128_ps(first, last, 0x20);
    all_[1] = _mm256_permute2f128_ps(first, last, 0x31);
  }
  template <int k>
  Vec at() const {
    if constexpr (kGroups == 16)
      return reinterpret_cast<Vec>(_mm256_shuffle_ps(all_[0], all_[1], k * 0x55));
    else
      return reinterpret_cast<Vec>(k == 0 ? _mm256_moveldup_ps(all_[0]) : _mm256_movehdup_ps(all_[0]));
  }

 private:
  __m256 all_[kGroups / 8];
#else
  void set(const Floats& v) {
    store_floats(all_, v);
    keep_in_memory(all_);
  }
  template <int k>
  Vec at() const {
    return broadcast(all_[place<k>(0)]);
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
