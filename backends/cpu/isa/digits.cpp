// Defines the table of digits.h for one instruction set, in the variable THIMBLE_DIGIT_KERNELS. vector.h says
// what this file must not include.
#include "backends/cpu/digits.h"

#include "backends/cpu/isa/bytes.h"

namespace thimble::cpu {
namespace {

#ifdef THIMBLE_BYTE_PRODUCTS

// ---- block formats ----

// The members of a format here, for 256 elements at a time (one block, or up to eight):
//   Floats     Eight or Sixteen: a scale per group of 32 or of 16 elements
//   groups()   the scales, and what is subtracted from each group
//   numbers()  set s of vectors of the elements
//   kOffset    numbers() are too large by 1 << kOffset; -1: they are exact
//   kMost      their largest magnitude after that offset is removed
//   kMinima    whether anything is subtracted from the groups
//   kBook      numbers() are looked up in a table
//   kSigned    numbers() are signed bytes, with kFlip flipped; others are in [0, 64), in [0, 32) for Eight
template <typename F>
struct Groups {
  F scales, minima;
};
#if defined(__AVX512F__) || defined(__AVXVNNI__)
constexpr uint8_t kFlip = 128;
#else
constexpr uint8_t kFlip = 0;
#endif
struct Numbers {
  using Floats = Eight;
  static constexpr int kOffset = -1;
  static constexpr bool kMinima = false, kSigned = false, kBook = false;
};

// Common to the formats with blocks of 32.
template <DType type>
struct Block32 : BlockOf<type>, Numbers {
  static constexpr int kBytes = BlockOf<type>::kBytes;
  // A half from each block.
  template <int kAt>
  static Eight halves(const std::byte* b) {
    return to_floats(halves_of_blocks<kBytes, kAt>(b));
  }
  static Groups<Eight> groups(const std::byte* b) { return {halves<0>(b), Eight{}}; }
  template <int s, int kAt>
  static Together nibbles(const std::byte* b) {
    return nibbles_of_blocks<s, kBytes, kAt>(b);
  }
};

struct Q8_0Digits : Block32<DType::kQ8_0> {
  static constexpr int kMost = 128;
  static constexpr bool kSigned = true;
  template <int s>
  static Together numbers(const std::byte* b) {
    Together w = bytes_of_blocks<s, kBytes, 2>(b);
    for (Bytes& v : w.of) v ^= kFlip;
    return w;
  }
};

struct Q4_0Digits : Block32<DType::kQ4_0> {
  static constexpr int kMost = 8;
  static constexpr int kOffset = 3;
  template <int s>
  static Together numbers(const std::byte* b) {
    return nibbles<s, 2>(b);
  }
};

struct Q4_1Digits : Block32<DType::kQ4_1> {
  static constexpr int kMost = 15;
  static constexpr bool kMinima = true;
  static Groups<Eight> groups(const std::byte* b) { return {halves<0>(b), -halves<2>(b)}; }
  template <int s>
  static Together numbers(const std::byte* b) {
    return nibbles<s, 4>(b);
  }
};

// The values of a code book plus `added`.
struct ByteBook {
  ByteValues values;
  constexpr ByteBook(const int (&of)[16], int added) : values() {
    for (int i = 0; i < 16; ++i) values[i] = static_cast<uint8_t>(of[i] + added);
  }
  Together operator[](Together i) const {
    for (Bytes& v : i.of) v = lookup_bytes(values, v);
    return i;
  }
};
constexpr ByteBook kIq4Bytes({THIMBLE_IQ4_VALUES}, kFlip);

struct IQ4_NLDigits : Block32<DType::kIQ4_NL> {
  static constexpr int kMost = 127;
  static constexpr bool kSigned = true, kBook = true;
  template <int s>
  static Together numbers(const std::byte* b) {
    return kIq4Bytes[nibbles<s, 2>(b)];
  }
};

struct MXFP4Digits : Block32<DType::kMXFP4> {
  static constexpr int kMost = 12;
  static constexpr int kOffset = 4;
  static constexpr bool kBook = true;
  static constexpr ByteBook kValues{{THIMBLE_FP4_VALUES}, 1 << kOffset};
  static Groups<Eight> groups(const std::byte* b) {
    // 2^(x - 128) is half of 2^(x - 127), which is subnormal for an x of 0 and infinite for an x of 255; the
    // latter stands for NaN.
    const EightInts x = first_bytes_of_blocks<kBytes>(b), least = EightInts{} + 0x00400000;
    return {0.5f * reinterpret_cast<Eight>(x > least ? x : least), Eight{}};
  }
  template <int s>
  static Together numbers(const std::byte* b) {
    return kValues[nibbles<s, 1>(b)];
  }
};

struct NVFP4Digits : BlockOf<DType::kNVFP4>, Numbers {
  using Floats = Sixteen;
  static constexpr int kMost = 12;
  static constexpr int kOffset = 4;
  static constexpr bool kBook = true;
  static Groups<Sixteen> groups(const std::byte* b) {
    Groups<Sixteen> g;
    for (int i = 0; i < 16; i += kLanes)
      g.scales.parts[i / kLanes] = half_of_e4m3(unsigned_of(scales_of_nvfp4(b), i));
    return g;
  }
  template <int s>
  static Together numbers(const std::byte* b) {
    return MXFP4Digits::kValues[nibbles_of_nvfp4<s>(b)];
  }
};

struct Q2_0Digits : BlockOf<DType::kQ2_0>, Numbers {
  static constexpr int kMost = 2;
  static constexpr int kOffset = 0;
  static Groups<Eight> groups(const std::byte* b) {
    const auto half = [&](int block) { return static_cast<uint16_t>(u16_at(b + 18 * block)); };
    const uint16_t of[] = {half(0), half(1), half(2), half(3)};
    return {to_floats(EightHalves{of[0], of[0], of[1], of[1], of[2], of[2], of[3], of[3]}), Eight{}};
  }
  template <int s>
  static Together numbers(const std::byte* b) {
    return pairs_of_q2_0<s>(b);
  }
};

struct Q1_0Digits : BlockOf<DType::kQ1_0>, Numbers {
  static constexpr int kMost = 1;
  static constexpr int kOffset = 0;
  static Groups<Eight> groups(const std::byte* b) {
    const auto half = [&](int block) { return static_cast<uint16_t>(u16_at(b + 18 * block)); };
    const uint16_t of[] = {half(0), half(1)};
    return {to_floats(EightHalves{of[0], of[0], of[0], of[0], of[1], of[1], of[1], of[1]}), Eight{}};
  }
  template <int s>
  static Together numbers(const std::byte* b) {
    return bits_of_q1_0<s>(b);
  }
};

template <DType type>
struct Block256 : BlockOf<type>, Numbers {};
template <DType type>
struct Block256Of16 : Block256<type> {
  using Floats = Sixteen;
};

// Where the bits of group g are, as bits_of_groups() expects: nibbles of two adjacent groups; nibbles of two
// groups that are two apart, in each half of 128 elements; pairs of bits of the four groups of a half; single
// bits of all eight groups.
struct HalvesOfTwo {
  static constexpr int at(int g) { return g / 2 * 32; }
  static constexpr int down(int g) { return g % 2 * 4; }
};
struct HalvesApart {
  static constexpr int at(int g) { return g / 4 * 64 + g % 2 * 32; }
  static constexpr int down(int g) { return g % 4 / 2 * 4; }
};
template <int to>
struct PairsOfBits {
  static constexpr int at(int g) { return g / 4 * 32; }
  static constexpr int down(int g) { return g % 4 * 2 - to; }
};
template <int to>
struct SingleBits {
  static constexpr int at(int) { return 0; }
  static constexpr int down(int g) { return g - to; }
};

struct Q4_KDigits : Block256<DType::kQ4_K> {
  static constexpr int kMost = 15;
  static constexpr bool kMinima = true;
  static Groups<Eight> groups(const std::byte* b) {
    const PackedGroups g(b);
    return {g.scales, g.minima};
  }
  template <int s>
  static Together numbers(const std::byte* b) {
    return bits_of_groups<HalvesOfTwo, s, 15>(b + 16);
  }
};

struct Q5_KDigits : Block256<DType::kQ5_K> {
  static constexpr int kMost = 31;
  static constexpr bool kMinima = true;
  static Groups<Eight> groups(const std::byte* b) { return Q4_KDigits::groups(b); }
  template <int s>
  static Together numbers(const std::byte* b) {
    return bits_of_groups<HalvesOfTwo, s, 15>(b + 48) | bits_of_groups<SingleBits<4>, s, 16>(b + 16);
  }
};

struct Q6_KDigits : Block256Of16<DType::kQ6_K> {
  static constexpr int kMost = 32;
  static constexpr int kOffset = 5;
  static Groups<Sixteen> groups(const std::byte* b) {
    Groups<Sixteen> g;
    for (int i = 0; i < 16; i += kLanes)
      g.scales.parts[i / kLanes] = scale_at(b + 208) * to_float(signed_at(b + 192 + i));
    return g;
  }
  template <int s>
  static Together numbers(const std::byte* b) {
    return bits_of_groups<HalvesApart, s, 15>(b) | bits_of_groups<PairsOfBits<4>, s, 48>(b + 128);
  }
};

struct Q2_KDigits : Block256Of16<DType::kQ2_K> {
  static constexpr int kMost = 3;
  static constexpr bool kMinima = true;
  static Groups<Sixteen> groups(const std::byte* b) {
    Groups<Sixteen> g;
    for (int i = 0; i < 16; i += kLanes) {
      const IntVec both = unsigned_at(b + i);
      g.scales.parts[i / kLanes] = scale_at(b + 80) * to_float(both & 15);
      g.minima.parts[i / kLanes] = scale_at(b + 82) * to_float(both >> 4);
    }
    return g;
  }
  template <int s>
  static Together numbers(const std::byte* b) {
    return bits_of_groups<PairsOfBits<0>, s, 3>(b + 16);
  }
};

struct Q3_KDigits : Block256Of16<DType::kQ3_K> {
  static constexpr int kMost = 4;
  static constexpr int kOffset = 2;
  static Groups<Sixteen> groups(const std::byte* b) {
    const Scales6 scales(b + 96, scale_at(b + 108));
    Groups<Sixteen> g;
    load_floats(scales.of, g.scales);
    return g;
  }
  template <int s>
  static Together numbers(const std::byte* b) {
    return bits_of_groups<PairsOfBits<0>, s, 3>(b + 32) | bits_of_groups<SingleBits<2>, s, 4>(b);
  }
};

struct IQ4_XSDigits : Block256<DType::kIQ4_XS> {
  static constexpr int kMost = 127;
  static constexpr bool kSigned = true, kBook = true;
  static Groups<Eight> groups(const std::byte* b) {
#if defined(__AVX512F__)
    const uint64_t bytes =
        _pdep_u64(u32_at(b + 4), 0x0f0f0f0f0f0f0f0f) | _pdep_u64(u16_at(b + 2), 0x3030303030303030);
    const EightInts of =
        reinterpret_cast<EightInts>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes))));
#else
    // The upper two bits of each scale are stored after a half and go above its lower four.
    const EightInts low = EightInts{} + static_cast<int32_t>(u32_at(b + 4)),
                    high = EightInts{} + static_cast<int32_t>(u32_at(b));
    const EightInts of = ((low >> EightInts{0, 4, 8, 12, 16, 20, 24, 28}) & 15) |
                         ((high >> EightInts{12, 14, 16, 18, 20, 22, 24, 26}) & 48);
#endif
    return {eight_of_half(b) * __builtin_convertvector(of - 32, Eight), Eight{}};
  }
  template <int s>
  static Together numbers(const std::byte* b) {
    return kIq4Bytes[nibbles_of_blocks<s, 16, 8>(b)];
  }
};

struct TQ2_0Digits : Block256<DType::kTQ2_0> {
  static constexpr int kMost = 2;
  static constexpr int kOffset = 0;
  static Groups<Eight> groups(const std::byte* b) { return {eight_of_half(b + 64), Eight{}}; }
  template <int s>
  static Together numbers(const std::byte* b) {
    return bits_of_groups<PairsOfBits<0>, s, 3>(b);
  }
};

// Calls call(format) if the type has a format here; returns whether it has.
template <typename Call>
inline bool with_digits(DType type, const Call& call) {
  switch (type) {
#define THIMBLE_DIGITS(name) \
  case DType::k##name:       \
    call(name##Digits());    \
    return true;
    THIMBLE_DIGITS(Q8_0)
    THIMBLE_DIGITS(Q4_0)
    THIMBLE_DIGITS(Q4_1)
    THIMBLE_DIGITS(Q2_K)
    THIMBLE_DIGITS(Q3_K)
    THIMBLE_DIGITS(Q4_K)
    THIMBLE_DIGITS(Q5_K)
    THIMBLE_DIGITS(Q6_K)
    THIMBLE_DIGITS(IQ4_NL)
    THIMBLE_DIGITS(IQ4_XS)
    THIMBLE_DIGITS(MXFP4)
    THIMBLE_DIGITS(TQ2_0)
    THIMBLE_DIGITS(NVFP4)
    THIMBLE_DIGITS(Q2_0)
    THIMBLE_DIGITS(Q1_0)
#undef THIMBLE_DIGITS
    default:
      return false;
  }
}

bool knows(DType type) {
  return with_digits(type, [](auto) {});
}

// ---- digits of x ----

constexpr int32_t kLargestInteger = 127 * (1 + 256 + 256 * 256);

// Returns v = 256 * result + rest; the rest is a digit.
inline IntVec divide_by_256(IntVec v, IntVec& rest) {
  const IntVec quotient = (v + 128) >> 8;
  rest = v - times_256(quotient);
  return quotient;
}

// Stores the digits of the elements from i on in their vectors.
inline void put_digits(IntVec v, int i, int8_t* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // gcc 12 would narrow lane by lane
  const __m256i words = _mm256_packs_epi32(reinterpret_cast<__m256i>(v), reinterpret_cast<__m256i>(v)),
                bytes = _mm256_packs_epi16(words, words);
  const __m128i narrow =
      _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
#else
  typedef int8_t Narrow __attribute__((vector_size(kLanes)));
  const Narrow narrow = __builtin_convertvector(v, Narrow);
#endif
  constexpr int kPiece = kLanes < kRun ? kLanes : kRun;
  for (int at = 0; at < kLanes; at += kPiece, i += kPiece)
    __builtin_memcpy(to + 3 * kVectorBytes * vector_of(i) + place_of(i),
                     reinterpret_cast<const int8_t*>(&narrow) + at, kPiece);
}

template <int Step = kLanes / 2>
inline uint32_t largest_lane(IntVec a) {
  if constexpr (Step == 0) {
    return static_cast<uint32_t>(a[0]);
  } else {
    const IntVec b = reinterpret_cast<IntVec>(
        moved<Step>(reinterpret_cast<Vec>(a), std::make_integer_sequence<int, kLanes>()));
    return largest_lane<Step / 2>(a > b ? a : b);
  }
}

// The unit of 32 numbers: the smallest power of two for which the largest number fits into three digits.
struct Unit {
  float unit, scale;  // scale = 1 / unit; infinity and NaN have no digits: unit NaN, scale 0
};
inline Unit unit_of_32(const float* x) {
  IntVec most = {};
  for (int i = 0; i < 32; i += kLanes) {  // compared as integers, so that NaN is the largest
    const IntVec bits = reinterpret_cast<IntVec>(load(x + i)) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  const uint32_t largest = largest_lane(most);
  uint32_t exponent = largest >> 23;
  if (exponent == 255) return {__builtin_nanf(""), 0};
  if (exponent < 32) exponent = 32;  // numbers below 2^-95 lose bits
  // The largest number is scaled to [2^22, 2^23), or to half of that if it is too large.
  if (from_bits(largest) * from_bits((276 - exponent) << 23) > static_cast<float>(kLargestInteger))
    ++exponent;
  return {from_bits((exponent - 22) << 23), from_bits((276 - exponent) << 23)};
}

// Sums of a lane's integers over n vectors: of their upper two digits, and of their lowest digit.
struct DigitSums {
  IntVec high, low;
};
template <int n>
inline DigitSums sums_of(const int8_t* digits) {
  Bytes ones[n];
  Digits of[3][n];
  for (int i = 0; i < n; ++i) {
    ones[i] = Bytes{} + 1;
    for (int level = 0; level < 3; ++level)
      of[level][i] = load_digits(digits + (3 * i + level) * kVectorBytes);
  }
  return {products_of_two(ones, of[0], of[1]), add_products(IntVec{}, ones, of[2])};
}
inline void store_ints(int32_t* p, IntVec v) { __builtin_memcpy(p, &v, sizeof v); }

// Converts the groups of 32 from `first` up to `end`; the other groups become zeros.
void take_block(const float* x, uint32_t first, uint32_t end, DigitBlock& out) {
  __builtin_memset(&out, 0, sizeof out);
  int32_t integers[256] = {};
  for (uint32_t group = first; group < end; ++group, x += 32) {
    const Unit unit = unit_of_32(x);
    out.units[group] = out.units_of_16[2 * group] = out.units_of_16[2 * group + 1] = unit.unit;
    for (int i = 0; i < 32; i += kLanes) {
      const IntVec whole = unit.scale > 0 ? to_nearest(load(x + i) * unit.scale) : IntVec{};
      __builtin_memcpy(integers + 32 * group + i, &whole, sizeof whole);
    }
  }
  for (int i = 0; i < 256; i += kLanes) {
    IntVec v, low, middle;
    __builtin_memcpy(&v, integers + i, sizeof v);
    const IntVec two = divide_by_256(v, low), high = divide_by_256(two, middle);
    put_digits(high, i, out.digits);
    put_digits(middle, i, out.digits + kVectorBytes);
    put_digits(low, i, out.digits + 2 * kVectorBytes);
#ifdef THIMBLE_PAIRS_OF_PRODUCTS
    put_words(v, i, out.words);
#endif
  }
  for (int s = 0; s < kSets; ++s) {
    const int8_t* digits = out.digits + 3 * kVectorBytes * kTogether * s;
    const DigitSums all = sums_of<kTogether>(digits);
    store_ints(out.eightfold + s * kLanes, 8 * (times_256(all.high) + all.low));
    store_ints(out.minus_high + s * kLanes, -128 * all.high);
    store_ints(out.minus_low + s * kLanes, -128 * all.low);
    for (int half = 0; half < 2; ++half) {
      const DigitSums sums = sums_of<kTogether / 2>(digits + half * 3 * kVectorBytes * kTogether / 2);
      const IntVec of_lanes = times_256(sums.high) + sums.low;
      store_ints(out.eightfold_of_16 + (2 * s + half) * kLanes, 8 * of_lanes);
      // Sums of the integers, not of x, so that minima are multiplied with the same numbers as the elements.
      for (int i = 0; i < kVectorGroups; ++i) {
        int32_t sum = 0;
        for (int lane = i * kRun / 4; lane < (i + 1) * kRun / 4; ++lane) sum += of_lanes[lane];
        const int at = 2 * group_of(s, i) + half;
        out.sums_of_16[at] = static_cast<float>(sum) * out.units_of_16[at];
      }
    }
  }
  for (int i = 0; i < 8; ++i) out.sums[i] = out.sums_of_16[2 * i] + out.sums_of_16[2 * i + 1];
}

void take(const float* x, uint32_t n, DigitBlock* out) {
  const bool many = n >= 256;
  for (; n >= 256; n -= 256, x += 256, ++out) take_block(x, 0, 8, *out);
  const uint32_t rest = n / 32, first = many ? 8 - rest : 0;
  if (rest > 0) take_block(x, first, first + rest, *out);
}

// ---- products ----

// Calls call(s) for all sets of vectors of 256 elements; s is a constant.
template <typename Call, int... s>
inline __attribute__((always_inline)) void each_set(const Call& call, std::integer_sequence<int, s...>) {
  (call(std::integral_constant<int, s>()), ...);
}

template <typename Format, int w_rows, int x_rows>
struct Sums {
  using Floats = typename Format::Floats;
  static constexpr bool kOf32 = LaneFactors<Floats>::kGroups == 8;
  static constexpr int kChains = kSets > 2 ? 2 : 1;  // two sums hide the latency of the additions
  struct Sum {
    Vec products[kChains] = {};
  };
  Sum of[w_rows][x_rows];

  // Without an instruction that adds products to integers, a set takes more instructions than the processor's
  // window holds, so the next set's numbers are prepared before this one is multiplied. Processing two
  // independent rows of W helps only if the numbers take long to prepare.
#ifdef THIMBLE_PAIRS_OF_PRODUCTS
  static constexpr bool kLongSets = true;
#else
  static constexpr bool kLongSets = false;
#endif
  static constexpr bool kNumbersAhead = kLongSets && (w_rows == 1 || Format::kBook);
  struct Ahead {
    Together rows[w_rows];
  };
  // Prepares the first add().
  static inline __attribute__((always_inline)) Ahead begin(const std::byte* b, size_t w_stride) {
    Ahead ahead = {};
    if constexpr (kNumbersAhead)
      for (int c = 0; c < w_rows; ++c) ahead.rows[c] = Format::template numbers<0>(b + c * w_stride);
    return ahead;
  }
  // Adds the products of 256 elements of each row of W; rows are w_stride bytes apart. `next` is `b` of the
  // next add(), or any valid block.
  inline __attribute__((always_inline)) void add(const std::byte* b, const std::byte* next, Ahead& ahead,
                                                 size_t w_stride, const DigitBlock* x, size_t x_stride) {
    LaneFactors<Floats> factors[w_rows][x_rows];
    for (int c = 0; c < w_rows; ++c) {
      const Groups<Floats> groups = Format::groups(b + c * w_stride);
      for (int r = 0; r < x_rows; ++r) {
        const DigitBlock& block = x[r * x_stride];
        Floats of_x;
        load_floats(kOf32 ? block.units : block.units_of_16, of_x);
        factors[c][r].set(groups.scales * of_x);
        if constexpr (Format::kMinima) {
          load_floats(kOf32 ? block.sums : block.sums_of_16, of_x);
          take_off(of[c][r].products[kChains - 1], groups.minima, of_x);
        }
      }
    }
    each_set(
        [&](auto constant) __attribute__((always_inline)) {
          constexpr int s = decltype(constant)::value, kFirst = s * kTogether, kHalf = kTogether / 2;
          for (int c = 0; c < w_rows; ++c) {
            Together w;
            if constexpr (kNumbersAhead) {
              const std::byte* const of_next = s + 1 < kSets ? b : next;
              w = ahead.rows[c];
              ahead.rows[c] = Format::template numbers<(s + 1) % kSets>(of_next + c * w_stride);
            } else {
              w = Format::template numbers<s>(b + c * w_stride);
            }
            for (int r = 0; r < x_rows; ++r) {
              const DigitBlock& block = x[r * x_stride];
              const LaneFactors<Floats>& f = factors[c][r];
              Vec* const products = of[c][r].products;
              if constexpr (kOf32) {
                products[s % kChains] += product<kFirst, kTogether>(w.of, block) * f.template at<s>();
              } else {
                products[0] += product<kFirst, kHalf>(w.of, block) * f.template at<2 * s>();
                products[kChains - 1] +=
                    product<kFirst + kHalf, kHalf>(w.of + kHalf, block) * f.template at<2 * s + 1>();
              }
            }
          }
        },
        std::make_integer_sequence<int, kSets>());
  }

  float total(int c, int r) const {
    return sum_lanes(kChains == 1 ? of[c][r].products[0]
                                  : of[c][r].products[0] + of[c][r].products[1 % kChains]);
  }

 private:
  static inline IntVec load_ints(const int32_t* p) {
    IntVec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  // Multiplies n vectors from vector k on.
  template <int k, int n>
  static inline __attribute__((always_inline)) Vec product(const Bytes* w, const DigitBlock& x) {
#ifdef THIMBLE_PAIRS_OF_PRODUCTS
    if constexpr (Format::kSigned) return products_of_words<n>(w, x.words + 64 * k);
#endif
    Digits high[n], middle[n], low[n];
    for (int i = 0; i < n; ++i) {
      const int8_t* digits = x.digits + 3 * kVectorBytes * (k + i);
      high[i] = load_digits(digits);
      middle[i] = load_digits(digits + kVectorBytes);
      low[i] = load_digits(digits + 2 * kVectorBytes);
    }
    constexpr int kSums = k / n * kLanes;  // offset of the sums of these n vectors
    static_assert(!Format::kSigned || Format::kOffset < 0);
    // Sum in two parts if the total may exceed 32 bits; each part is at most 16 * 255 * 128 * 256.
    if constexpr (4 * n * static_cast<int64_t>(Format::kMost) * kLargestInteger >= int64_t{1} << 31) {
      IntVec upper = {}, lower = {};
#if defined(__AVX512F__) || defined(__AVXVNNI__)
      // The instruction needs unsigned numbers, so they are increased by 128.
      if constexpr (Format::kSigned) {
        upper = load_ints(x.minus_high + kSums);
        lower = load_ints(x.minus_low + kSums);
      }
#endif
      upper += products_of_two(w, high, middle);
      lower = add_products(lower, w, low);
      return to_float(upper) * 256 + to_float(lower);
    } else {
      IntVec upper;
#ifdef THIMBLE_PAIRS_OF_PRODUCTS
      upper = products_of_two(w, high, middle);
#else
      if constexpr (n > 2)  // three independent sums, since the chains are long
        upper = times_256(add_products(IntVec{}, w, high)) + add_products(IntVec{}, w, middle);
      else
        upper = products_of_two(w, high, middle);
#endif
      const IntVec lower = add_products(IntVec{}, w, low);
      if constexpr (Format::kOffset < 0) {
        return to_float(times_256(upper) + lower);
      } else {
        // Unsigned arithmetic, because the sums are exact only modulo 2^32 until 1 << kUp times eightfold is
        // subtracted.
        typedef uint32_t Modular __attribute__((vector_size(sizeof(IntVec))));
        const IntVec eightfold = load_ints((kOf32 ? x.eightfold : x.eightfold_of_16) + kSums);
        constexpr int kUp = Format::kOffset > 3 ? Format::kOffset - 3 : 0, kDown = 3 + kUp - Format::kOffset;
        const Modular rest =
            (reinterpret_cast<Modular>(upper) << (8 - kUp)) - reinterpret_cast<Modular>(eightfold >> kDown);
        return to_float(reinterpret_cast<IntVec>((rest << kUp) + reinterpret_cast<Modular>(lower)));
      }
    }
  }
};

template <typename Format, int w_rows, int x_rows>
__attribute__((flatten)) void dot_rows(const std::byte* w, size_t w_stride, uint32_t n, const DigitBlock* x,
                                       size_t x_stride, float* out) {
  // Rows are contiguous in memory, and the processor's own prefetcher cannot keep up.
  constexpr size_t kAhead = w_rows > 1 ? kStreamsAhead : 4096,
                   kStepBytes = 256 / Format::kBlock * Format::kBytes;
  const bool many = n >= 256;
  using S = Sums<Format, w_rows, x_rows>;
  S sums;
  typename S::Ahead ahead = many ? S::begin(w, w_stride) : typename S::Ahead();
  for (; n >= 256; n -= 256, w += kStepBytes, ++x) {
    for (int c = 0; c < w_rows; ++c)
      for (size_t line = 0; line < kStepBytes; line += 64)
        __builtin_prefetch(w + c * w_stride + kAhead + line);
    sums.add(w, n >= 512 ? w + kStepBytes : w, ahead, w_stride, x, x_stride);
  }
  if constexpr (Format::kBlock < 256)
    // The last 256 elements, with zeros in x for blocks already multiplied, or zeros after fewer than 256
    if (n > 0) {
      const size_t bytes = n / Format::kBlock * Format::kBytes;
      std::byte few[w_rows][kStepBytes];
      if (!many) {
        __builtin_memset(few, 0, sizeof few);
        for (int c = 0; c < w_rows; ++c) __builtin_memcpy(few[c], w + c * w_stride, bytes);
      }
      const std::byte* const last = many ? w + bytes - kStepBytes : few[0];
      const size_t stride = many ? w_stride : kStepBytes;
      ahead = S::begin(last, stride);
      sums.add(last, last, ahead, stride, x, x_stride);
    }
  for (int c = 0; c < w_rows; ++c)
    for (int r = 0; r < x_rows; ++r) out[c * x_rows + r] = sums.total(c, r);
}

void dot(DType type, const std::byte* w, uint32_t n, const DigitBlock* x, size_t x_stride, uint32_t x_rows,
         float* out) {
  with_digits(type, [=](auto format) {
    using F = decltype(format);
    static_assert(kMaxDotRows == 4);
    constexpr decltype(&dot_rows<F, 1, 1>) kRows[] = {dot_rows<F, 1, 1>, dot_rows<F, 1, 2>, dot_rows<F, 1, 3>,
                                                      dot_rows<F, 1, 4>};
    kRows[x_rows - 1](w, 0, n, x, x_stride, out);
  });
}

// Measured with rows of 14336 numbers, two threads, GB/s for 1, 2 and 4 streams: q6_K with VNNI 15, 20 and
// 22. With vectors of 256 bits, one thread: q6_K 18, 21 and 21, q8_0 21, 23 and 32. With AVX2 alone, q8_0
// gains from more than two streams and q6_K loses. With half the registers, both lose 4 to 20 % with two
// streams if x leaves room in the first-level cache. Not measured on Arm.
#if defined(__AVX512F__)
constexpr uint32_t kStreams = 4, kStreamRows = 2, kNarrow = 0;
#elif defined(__AVXVNNI__)
constexpr uint32_t kStreams = 4, kStreamRows = 1, kNarrow = 4096;
#else
constexpr uint32_t kStreams = 2, kStreamRows = 1, kNarrow = 4096;
#endif
void dot_streams(DType type, const std::byte* w, size_t w_stride, uint32_t n, const DigitBlock* x,
                 size_t x_stride, uint32_t x_rows, float* out) {
  with_digits(type, [=](auto format) {
    using F = decltype(format);
    if (x_rows == 1)
      dot_rows<F, kStreams, 1>(w, w_stride, n, x, x_stride, out);
    else
      dot_rows<F, kStreams, kStreamRows>(w, w_stride, n, x, x_stride, out);
  });
}

#endif

}  // namespace

extern const DigitKernels THIMBLE_DIGIT_KERNELS;
#ifdef THIMBLE_BYTE_PRODUCTS
const DigitKernels THIMBLE_DIGIT_KERNELS = {
#if defined(__AVX512VNNI__)
    .name = "vnni",
    .few_rows = 16,
#elif defined(__AVXVNNI__)
    .name = "avxvnni",
    .few_rows = 8,
#elif defined(__AVX2__)
    .name = "avx2",
    .few_rows = 8,
#else
    .name = "dotprod",
    .few_rows = 8,
#endif
    .streams = kStreams,
    .stream_rows = kStreamRows,
    .narrow = kNarrow,
    .knows = knows,
    .take = take,
    .dot = dot,
    .dot_streams = dot_streams,
};
#else
const DigitKernels THIMBLE_DIGIT_KERNELS = {
    .name = "none",
    .few_rows = 0,
    .streams = 0,
    .stream_rows = 0,
    .narrow = 0,
    .knows = [](DType) { return false; },
    .take = nullptr,
    .dot = nullptr,
    .dot_streams = nullptr,
};
#endif

}  // namespace thimble::cpu
