// The table of digits.h for one instruction set, in the variable THIMBLE_DIGIT_KERNELS. See vector.h for what
// this file must not include.
#include "backends/cpu/digits.h"

#include "backends/cpu/isa/bytes.h"

namespace thimble::cpu {
namespace {

#ifdef THIMBLE_BYTE_PRODUCTS

// ---- block formats ----

// What a format is made of here, for 256 elements at a time, which are one block or `count` <= 8 of them:
//   kGroup     elements that share a scale
//   kOffset    numbers are 1 << kOffset smaller than those that numbers() gives; -1: they are the same
//   kSigned    numbers() gives bytes with a sign, others are in [0, 64)
//   kMinima    what is taken off a group of 32 or 16, or 0
//   scales()   the groups' scales, and minima behind them
//   numbers()  vector k of them

// What the blocks of 32 have in common.
template <DType type>
struct Block32 : BlockOf<type> {
  static constexpr int kGroup = 32, kOffset = -1, kMinima = 0;
  static constexpr bool kSigned = false;
  // Block `i`, or the first one where there are no more: it will be multiplied with zeros.
  static const std::byte* block(const std::byte* b, uint32_t count, uint32_t i) {
    return b + (i < count ? i * BlockOf<type>::kBytes : 0);
  }
  // A half of each block.
  static Eight halves(const std::byte* b, uint32_t count, size_t at) {
    const auto of = [&](uint32_t i) { return static_cast<uint16_t>(u16_at(block(b, count, i) + at)); };
    return to_floats(EightHalves{of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)});
  }
  template <int k>
  static Bytes nibbles(const std::byte* b, uint32_t count, size_t at) {
    constexpr uint32_t kFirst = k * kVectorBytes / 32;
    return nibbles_of_blocks<k>(block(b, count, kFirst) + at, block(b, count, kFirst + 1) + at);
  }
};
inline void store_eight(float* to, Eight v) { __builtin_memcpy(to, &v, sizeof v); }

struct Q8_0Digits : Block32<DType::kQ8_0> {
  static constexpr bool kSigned = true;
  static void scales(const std::byte* b, uint32_t count, float* out) { store_eight(out, halves(b, count, 0)); }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t count) {
    constexpr uint32_t kFirst = k * kVectorBytes / 32;
    const std::byte* first = block(b, count, kFirst) + 2;
#if defined(__AVX512F__)
    const auto at = [](const std::byte* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
    return reinterpret_cast<Bytes>(_mm512_maskz_inserti64x4(
        0xff, _mm512_castsi256_si512(at(first)), at(block(b, count, kFirst + 1) + 2), 1));
#else
    return load_bytes(first + k * kVectorBytes % 32);
#endif
  }
};

struct Q4_0Digits : Block32<DType::kQ4_0> {
  static constexpr int kOffset = 3;
  static void scales(const std::byte* b, uint32_t count, float* out) { store_eight(out, halves(b, count, 0)); }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t count) {
    return nibbles<k>(b, count, 2);
  }
};

struct Q4_1Digits : Block32<DType::kQ4_1> {
  static constexpr int kMinima = 32;
  static void scales(const std::byte* b, uint32_t count, float* out) {
    store_eight(out, halves(b, count, 0));
    store_eight(out + 8, -halves(b, count, 2));
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t count) {
    return nibbles<k>(b, count, 4);
  }
};

constexpr ByteValues kIq4Bytes = {THIMBLE_IQ4_VALUES}, kFp4Bytes = {THIMBLE_FP4_VALUES};

struct IQ4_NLDigits : Block32<DType::kIQ4_NL> {
  static constexpr bool kSigned = true;
  static void scales(const std::byte* b, uint32_t count, float* out) { store_eight(out, halves(b, count, 0)); }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t count) {
    return lookup_bytes(kIq4Bytes, nibbles<k>(b, count, 2));
  }
};

struct MXFP4Digits : Block32<DType::kMXFP4> {
  static constexpr int kOffset = 4;
  static void scales(const std::byte* b, uint32_t count, float* out) {
    const auto of = [&](uint32_t i) { return static_cast<int32_t>(*block(b, count, i)); };
    const EightInts x = {of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)};
    store_eight(out, reinterpret_cast<Eight>(x < 2 ? 0x00200000 << x : (x - 1) << 23));
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t count) {
    return lookup_bytes(kFp4Bytes, nibbles<k>(b, count, 1)) + (1 << kOffset);
  }
};

template <DType type>
struct Block256 : BlockOf<type> {
  static constexpr int kGroup = 32, kOffset = -1, kMinima = 0;
  static constexpr bool kSigned = false;
};
// Whose groups are 16, and each half of 128 elements has bytes of its own.
template <DType type>
struct Groups16 : Block256<type> {
  static constexpr int kGroup = 16;
  static constexpr int kHalf = 128 / kVectorBytes;  // vectors
};

struct Q4_KDigits : Block256<DType::kQ4_K> {
  static constexpr int kMinima = 32;
  static void scales(const std::byte* b, uint32_t, float* out) {
    const GroupScales g(b);
    __builtin_memcpy(out, g.of, sizeof g.of);
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    return nibbles_of<32, k>(b + 16);
  }
};

struct Q5_KDigits : Block256<DType::kQ5_K> {
  static constexpr int kMinima = 32;
  static void scales(const std::byte* b, uint32_t, float* out) {
    const GroupScales g(b);
    __builtin_memcpy(out, g.of, sizeof g.of);
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    return nibbles_of<32, k>(b + 48) | bits_of_32<k, 1, 4, 16>(b + 16);
  }
};

struct Q6_KDigits : Groups16<DType::kQ6_K> {
  static constexpr int kOffset = 5;
  static void scales(const std::byte* b, uint32_t, float* out) {
    const float d = scale_at(b + 208);
    for (int i = 0; i < 16; i += kLanes) store(out + i, d * to_float(signed_at(b + 192 + i)));
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    return nibbles_of<64, k>(b) | bits_of_32<k % kHalf, 2, 4, 48>(b + 128 + k / kHalf * 32);
  }
};

struct Q2_KDigits : Groups16<DType::kQ2_K> {
  static constexpr int kMinima = 16;
  static void scales(const std::byte* b, uint32_t, float* out) {
    const float d = scale_at(b + 80), m = scale_at(b + 82);
    for (int i = 0; i < 16; i += kLanes) {
      const IntVec both = unsigned_at(b + i);
      store(out + i, d * to_float(both & 15));
      store(out + 16 + i, m * to_float(both >> 4));
    }
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    return bits_of_32<k % kHalf, 2, 0, 3>(b + 16 + k / kHalf * 32);
  }
};

struct Q3_KDigits : Groups16<DType::kQ3_K> {
  static constexpr int kOffset = 2;
  static void scales(const std::byte* b, uint32_t, float* out) {
    const Scales6 s(b + 96, scale_at(b + 108));
    __builtin_memcpy(out, s.of, sizeof s.of);
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    return bits_of_32<k % kHalf, 2, 0, 3>(b + 32 + k / kHalf * 32) | bits_of_32<k, 1, 2, 4>(b);
  }
};

struct IQ4_XSDigits : Block256<DType::kIQ4_XS> {
  static constexpr bool kSigned = true;
  static void scales(const std::byte* b, uint32_t, float* out) {
    const EightInts low = EightInts{} + static_cast<int32_t>(u32_at(b + 4)),
                    high = EightInts{} + static_cast<int32_t>(u16_at(b + 2));
    const EightInts of = ((low >> EightInts{0, 4, 8, 12, 16, 20, 24, 28}) & 15) |
                         ((high >> EightInts{0, 2, 4, 6, 8, 10, 12, 14}) & 3) << 4;
    store_eight(out, scale_at(b) * __builtin_convertvector(of - 32, Eight));
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    const std::byte* first = b + 8 + k * kVectorBytes / 32 * 16;
    return lookup_bytes(kIq4Bytes, nibbles_of_blocks<k>(first, first + 16));
  }
};

struct TQ2_0Digits : Block256<DType::kTQ2_0> {
  static constexpr int kOffset = 0;
  static void scales(const std::byte* b, uint32_t, float* out) {
    store_eight(out, Eight{} + scale_at(b + 64));
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    constexpr int kHalf = 128 / kVectorBytes;
    return bits_of_32<k % kHalf, 2, 0, 3>(b + k / kHalf * 32);
  }
};

// call(format) for a type that has one; whether it has.
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
#undef THIMBLE_DIGITS
    default:
      return false;
  }
}

bool knows(DType type) {
  return with_digits(type, [](auto) {});
}

// ---- digits of x ----

// v = 255 (result) + rest, both rounded so that the rest is in [-127, 127].
inline IntVec divide_by_255(IntVec v, IntVec& rest) {
  IntVec quotient = to_nearest(to_float(v) * (1.0f / 255));
  rest = v - times_255(quotient);
  // The product above is off by so much that the rest may be one too large.
  const IntVec above = rest > 127, below = rest < -127;
  rest += (below & 255) - (above & 255);
  quotient += below - above;
  return quotient;
}

inline void put_digits(IntVec v, int8_t* to) {
  typedef int8_t Narrow __attribute__((vector_size(kLanes)));
  const Narrow narrow = __builtin_convertvector(v, Narrow);
  __builtin_memcpy(to, &narrow, sizeof narrow);
}

// What 32 numbers share: as small a power of two as lets the largest have digits.
struct Unit {
  float unit, scale;  // scale = 1 / unit; no digits stand for infinity and NaN: NaN, 0
};
inline Unit unit_of_32(const float* x) {
  IntVec most = {};
  for (int i = 0; i < 32; i += kLanes) {  // as integers: NaN is the largest
    const IntVec bits = reinterpret_cast<IntVec>(load(x + i)) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  uint32_t largest = 0;
  for (int i = 0; i < kLanes; ++i)
    largest = static_cast<uint32_t>(most[i]) > largest ? static_cast<uint32_t>(most[i]) : largest;
  uint32_t exponent = largest >> 23;
  if (exponent == 255) return {__builtin_nanf(""), 0};
  if (exponent < 32) exponent = 32;  // numbers below 2^-95 lose some
  // Scaled to [2^22, 2^23), or half of that where it is too large.
  if (from_bits(largest) * from_bits((276 - exponent) << 23) > static_cast<float>(kLargestDigits)) ++exponent;
  return {from_bits((exponent - 22) << 23), from_bits((276 - exponent) << 23)};
}

void take_block(const float* x, uint32_t n, DigitBlock& out) {
  __builtin_memset(&out, 0, sizeof out);
  int32_t integers[256] = {};
  for (uint32_t group = 0; group < n / 32; ++group, x += 32) {
    const Unit unit = unit_of_32(x);
    out.units[group] = unit.unit;
    Vec sums[2] = {};
    for (int i = 0; i < 32; i += kLanes) {
      sums[i / 16] += load(x + i);
      const IntVec whole = unit.scale > 0 ? to_nearest(load(x + i) * unit.scale) : IntVec{};
      __builtin_memcpy(integers + 32 * group + i, &whole, sizeof whole);
    }
    out.sums_of_16[2 * group] = sum_lanes(sums[0]);
    out.sums_of_16[2 * group + 1] = sum_lanes(sums[1]);
    out.sums[group] = out.sums_of_16[2 * group] + out.sums_of_16[2 * group + 1];
  }
  for (int i = 0; i < 256; i += kLanes) {
    IntVec v, low, middle;
    __builtin_memcpy(&v, integers + i, sizeof v);
    const IntVec high = divide_by_255(divide_by_255(v, low), middle);
    int8_t* to = out.digits + i / kVectorBytes * 4 * kVectorBytes + i % kVectorBytes;
    put_digits(high, to);
    put_digits(middle, to + kVectorBytes);
    put_digits(low, to + 2 * kVectorBytes);
  }
  for (int i = 0; i < 256; i += 4) {
    const int32_t sum = (integers[i] + integers[i + 1]) + (integers[i + 2] + integers[i + 3]);
    __builtin_memcpy(out.digits + i / kVectorBytes * 4 * kVectorBytes + 3 * kVectorBytes + i % kVectorBytes, &sum, sizeof sum);
  }
}

void take(const float* x, uint32_t n, DigitBlock* out) {
  for (; n > 0; x += 256, ++out) {
    const uint32_t piece = n < 256 ? n : 256;
    take_block(x, piece, *out);
    n -= piece;
  }
}

// ---- products ----

// call(k) for all vectors of 256 elements, k a constant.
template <typename Call, int... k>
inline void each_vector(const Call& call, std::integer_sequence<int, k...>) {
  (call(std::integral_constant<int, k>()), ...);
}

// The units of groups of 16, two of them share one.
inline void double_units(const float* units, float* out) {
  for (int i = 0; i < 8; ++i) out[2 * i] = out[2 * i + 1] = units[i];
}

template <typename Format, int x_rows>
struct Sums {
  static constexpr int kSlots = 2;  // hide the latency of the additions
  Vec products[x_rows][kSlots] = {};
  Eight minima[x_rows] = {};

  // 256 elements: one block, or `count` <= 8.
  inline __attribute__((always_inline)) void add(const std::byte* b, uint32_t count, const DigitBlock* x,
                                                 size_t x_stride) {
    constexpr int kGroups = 256 / Format::kGroup;
    alignas(64) float scales[32], factors[x_rows][16];
    Format::scales(b, count, scales);
    for (int r = 0; r < x_rows; ++r) {
      const DigitBlock& block = x[r * x_stride];
      if constexpr (kGroups == 8) {
        store_eight(factors[r], load_eight(scales) * load_eight(block.units));
      } else {
        float units[16];
        double_units(block.units, units);
        for (int i = 0; i < 16; i += kLanes) store(factors[r] + i, load(scales + i) * load(units + i));
      }
      if constexpr (Format::kMinima == 32)
        minima[r] += load_eight(scales + 8) * load_eight(block.sums);
      else if constexpr (Format::kMinima == 16)
        for (int i = 0; i < 16; i += 8)
          minima[r] += load_eight(scales + 16 + i) * load_eight(block.sums_of_16 + i);
    }
    each_vector(
        [&](auto constant) __attribute__((always_inline)) {
          constexpr int k = decltype(constant)::value;
          if (k * kVectorBytes >= static_cast<int>(32 * count)) return;
          const Bytes w = Format::template numbers<k>(b, count);
          for (int r = 0; r < x_rows; ++r)
            products[r][k % kSlots] +=
                product<k>(w, x[r * x_stride].digits) * lane_factors<k, Format::kGroup>(factors[r]);
        },
        std::make_integer_sequence<int, 256 / kVectorBytes>());
  }

  float total(int r) const {
    Vec sum = products[r][0];
    for (int slot = 1; slot < kSlots; ++slot) sum += products[r][slot];
    float taken = 0;
    if constexpr (Format::kMinima != 0)
      for (int i = 0; i < 8; ++i) taken += minima[r][i];
    return sum_lanes(sum) - taken;
  }

 private:
  template <int k>
  static inline Vec product(Bytes w, const int8_t* digits) {
    const int8_t* x = digits + 4 * kVectorBytes * k;
    if constexpr (Format::kSigned) {
      const Bytes bare = without_sign(w);
      const IntVec high = products_of_two(bare, with_sign(x_at(x), w), with_sign(x_at(x + kVectorBytes), w)),
                   low = add_products(IntVec{}, bare, with_sign(x_at(x + 2 * kVectorBytes), w));
      // At most 4 * 128 * 127 * 256 < 2^24 and 2^16: exact floats.
      return to_float(high) * 255 + to_float(low);
    } else {
      // At most 4 * 63 * kLargestDigits < 2^31.
      IntVec sum = add_products(times_255(products_of_two(w, x_at(x), x_at(x + kVectorBytes))), w,
                                x_at(x + 2 * kVectorBytes));
      if constexpr (Format::kOffset >= 0) {
        IntVec of_x;
        __builtin_memcpy(&of_x, x + 3 * kVectorBytes, sizeof of_x);
        sum -= of_x << Format::kOffset;
      }
      return to_float(sum);
    }
  }
};

template <typename Format, int x_rows>
void dot_rows(const std::byte* blocks, uint32_t n, const DigitBlock* x, size_t x_stride, float* out) {
  // Rows follow one another in memory, and the processor's own prefetcher falls behind.
  constexpr size_t kAhead = 4096, kStepBytes = 256 / Format::kBlock * Format::kBytes;
  Sums<Format, x_rows> sums;
  for (; n >= 256; n -= 256, blocks += kStepBytes, ++x) {
    for (size_t line = 0; line < kStepBytes; line += 64) __builtin_prefetch(blocks + kAhead + line);
    sums.add(blocks, 8, x, x_stride);
  }
  if constexpr (Format::kBlock == 32)
    if (n > 0) sums.add(blocks, n / 32, x, x_stride);
  for (int r = 0; r < x_rows; ++r) out[r] = sums.total(r);
}

void dot(DType type, const std::byte* blocks, uint32_t n, const DigitBlock* x, size_t x_stride,
         uint32_t x_rows, float* out) {
  with_digits(type, [=](auto format) {
    using F = decltype(format);
    static_assert(kMaxDotRows == 4);
    constexpr decltype(&dot_rows<F, 1>) kRows[] = {dot_rows<F, 1>, dot_rows<F, 2>, dot_rows<F, 3>,
                                                   dot_rows<F, 4>};
    kRows[x_rows - 1](blocks, n, x, x_stride, out);
  });
}

#endif

}  // namespace

extern const DigitKernels THIMBLE_DIGIT_KERNELS;
#ifdef THIMBLE_BYTE_PRODUCTS
const DigitKernels THIMBLE_DIGIT_KERNELS = {
#if defined(__AVX512VNNI__)
    .name = "vnni",
#elif defined(__AVX512F__)
    .name = "avx512bw",
#elif defined(__AVX2__)
    .name = "avx2",
#else
    .name = "dotprod",
#endif
    .knows = knows,
    .take = take,
    .dot = dot,
};
#else
const DigitKernels THIMBLE_DIGIT_KERNELS = {
    .name = "none",
    .knows = [](DType) { return false; },
    .take = nullptr,
    .dot = nullptr,
};
#endif

}  // namespace thimble::cpu
