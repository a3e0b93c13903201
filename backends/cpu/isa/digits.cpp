// The table of digits.h for one instruction set, in the variable THIMBLE_DIGIT_KERNELS. See vector.h for what
// this file must not include.
#include "backends/cpu/digits.h"

#include "backends/cpu/isa/bytes.h"

namespace thimble::cpu {
namespace {

#ifdef THIMBLE_BYTE_PRODUCTS

// ---- block formats ----

// What a format is made of here, for 256 elements at a time, which are one block or `count` <= 8 of them:
//   Floats     Eight or Sixteen: groups of 32 or 16 elements have a scale each
//   groups()   the scales, and what is taken off each group
//   numbers()  vector k of the elements
//   kOffset    numbers() are 1 << kOffset too large; -1: they are as they should be
//   kMinima    whether anything is taken off
//   kSigned    numbers() are signed bytes, with kFlip flipped; others are in [0, 64)
template <typename F>
struct Groups {
  F scales, minima;
};
#if defined(__AVX512F__)
constexpr uint8_t kFlip = 128;
#else
constexpr uint8_t kFlip = 0;
#endif
struct Numbers {
  using Floats = Eight;
  static constexpr int kOffset = -1;
  static constexpr bool kMinima = false, kSigned = false;
};

// What the blocks of 32 have in common.
template <DType type>
struct Block32 : BlockOf<type>, Numbers {
  // Block `i`, or the first one where there are no more: it will be multiplied with zeros.
  static const std::byte* block(const std::byte* b, uint32_t count, uint32_t i) {
    return b + (i < count ? i * BlockOf<type>::kBytes : 0);
  }
  // A half of each block.
  static Eight halves(const std::byte* b, uint32_t count, size_t at) {
    const auto of = [&](uint32_t i) { return static_cast<uint16_t>(u16_at(block(b, count, i) + at)); };
    return to_floats(EightHalves{of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)});
  }
  static Groups<Eight> groups(const std::byte* b, uint32_t count) { return {halves(b, count, 0), Eight{}}; }
  template <int k>
  static Bytes nibbles(const std::byte* b, uint32_t count, size_t at) {
    constexpr uint32_t kFirst = k * kVectorBytes / 32;
    return nibbles_of_blocks<k>(block(b, count, kFirst) + at, block(b, count, kFirst + 1) + at);
  }
};

struct Q8_0Digits : Block32<DType::kQ8_0> {
  static constexpr bool kSigned = true;
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t count) {
    constexpr uint32_t kFirst = k * kVectorBytes / 32;
    const std::byte* first = block(b, count, kFirst) + 2;
#if defined(__AVX512F__)
    const auto at = [](const std::byte* p) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    };
    return reinterpret_cast<Bytes>(_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(at(first)),
                                                            at(block(b, count, kFirst + 1) + 2), 1)) ^
           kFlip;
#else
    return load_bytes(first + k * kVectorBytes % 32);
#endif
  }
};

struct Q4_0Digits : Block32<DType::kQ4_0> {
  static constexpr int kOffset = 3;
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t count) {
    return nibbles<k>(b, count, 2);
  }
};

struct Q4_1Digits : Block32<DType::kQ4_1> {
  static constexpr bool kMinima = true;
  static Groups<Eight> groups(const std::byte* b, uint32_t count) {
    return {halves(b, count, 0), -halves(b, count, 2)};
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t count) {
    return nibbles<k>(b, count, 4);
  }
};

// The values of a book with `added` added.
struct ByteBook {
  ByteValues values;
  constexpr ByteBook(const int (&of)[16], int added) : values() {
    for (int i = 0; i < 16; ++i) values[i] = static_cast<uint8_t>(of[i] + added);
  }
};
constexpr ByteBook kIq4Bytes({THIMBLE_IQ4_VALUES}, kFlip);

struct IQ4_NLDigits : Block32<DType::kIQ4_NL> {
  static constexpr bool kSigned = true;
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t count) {
    return lookup_bytes(kIq4Bytes.values, nibbles<k>(b, count, 2));
  }
};

struct MXFP4Digits : Block32<DType::kMXFP4> {
  static constexpr int kOffset = 4;
  static constexpr ByteBook kValues{{THIMBLE_FP4_VALUES}, 1 << kOffset};
  static Groups<Eight> groups(const std::byte* b, uint32_t count) {
    const auto of = [&](uint32_t i) { return static_cast<int32_t>(*block(b, count, i)); };
    const EightInts x = {of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)};
    const EightInts few = (EightInts{} + 0x00200000) << (x & 1);
    return {reinterpret_cast<Eight>(x < 2 ? few : (x - 1) << 23), Eight{}};
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t count) {
    return lookup_bytes(kValues.values, nibbles<k>(b, count, 1));
  }
};

template <DType type>
struct Block256 : BlockOf<type>, Numbers {};
// Whose groups are 16, and each half of 128 elements has bytes of its own.
template <DType type>
struct Block256Of16 : Block256<type> {
  using Floats = Sixteen;
  static constexpr int kHalf = 128 / kVectorBytes;  // vectors
};

// q4_K's and q5_K's, packed as GroupScales says.
inline Groups<Eight> packed_groups(const std::byte* b) {
  const uint32_t low = u32_at(b + 4), middle = u32_at(b + 8), high = u32_at(b + 12);
  const auto both = [](uint32_t first, uint32_t last) { return first | static_cast<uint64_t>(last) << 32; };
  return {
      scale_at(b) * bytes_to_floats(both(low & 0x3f3f3f3f, (high & 0x0f0f0f0f) | (low >> 2 & 0x30303030))),
      scale_at(b + 2) *
          bytes_to_floats(both(middle & 0x3f3f3f3f, (high >> 4 & 0x0f0f0f0f) | (middle >> 2 & 0x30303030)))};
}

struct Q4_KDigits : Block256<DType::kQ4_K> {
  static constexpr bool kMinima = true;
  static Groups<Eight> groups(const std::byte* b, uint32_t) { return packed_groups(b); }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    return nibbles_of<32, k>(b + 16);
  }
};

struct Q5_KDigits : Block256<DType::kQ5_K> {
  static constexpr bool kMinima = true;
  static Groups<Eight> groups(const std::byte* b, uint32_t) { return packed_groups(b); }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    return nibbles_of<32, k>(b + 48) | bits_of_32<k, 1, 4, 16>(b + 16);
  }
};

struct Q6_KDigits : Block256Of16<DType::kQ6_K> {
  static constexpr int kOffset = 5;
  static Groups<Sixteen> groups(const std::byte* b, uint32_t) {
    Groups<Sixteen> g;
    for (int i = 0; i < 16; i += kLanes)
      g.scales.parts[i / kLanes] = scale_at(b + 208) * to_float(signed_at(b + 192 + i));
    return g;
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    return nibbles_of<64, k>(b) | bits_of_32<k % kHalf, 2, 4, 48>(b + 128 + k / kHalf * 32);
  }
};

struct Q2_KDigits : Block256Of16<DType::kQ2_K> {
  static constexpr bool kMinima = true;
  static Groups<Sixteen> groups(const std::byte* b, uint32_t) {
    Groups<Sixteen> g;
    for (int i = 0; i < 16; i += kLanes) {
      const IntVec both = unsigned_at(b + i);
      g.scales.parts[i / kLanes] = scale_at(b + 80) * to_float(both & 15);
      g.minima.parts[i / kLanes] = scale_at(b + 82) * to_float(both >> 4);
    }
    return g;
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    return bits_of_32<k % kHalf, 2, 0, 3>(b + 16 + k / kHalf * 32);
  }
};

struct Q3_KDigits : Block256Of16<DType::kQ3_K> {
  static constexpr int kOffset = 2;
  static Groups<Sixteen> groups(const std::byte* b, uint32_t) {
    const Scales6 scales(b + 96, scale_at(b + 108));
    Groups<Sixteen> g;
    load_floats(scales.of, g.scales);
    return g;
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    return bits_of_32<k % kHalf, 2, 0, 3>(b + 32 + k / kHalf * 32) | bits_of_32<k, 1, 2, 4>(b);
  }
};

struct IQ4_XSDigits : Block256<DType::kIQ4_XS> {
  static constexpr bool kSigned = true;
  static Groups<Eight> groups(const std::byte* b, uint32_t) {
    const EightInts low = EightInts{} + static_cast<int32_t>(u32_at(b + 4)),
                    high = EightInts{} + static_cast<int32_t>(u16_at(b + 2));
    const EightInts of = ((low >> EightInts{0, 4, 8, 12, 16, 20, 24, 28}) & 15) |
                         ((high >> EightInts{0, 2, 4, 6, 8, 10, 12, 14}) & 3) << 4;
    return {scale_at(b) * __builtin_convertvector(of - 32, Eight), Eight{}};
  }
  template <int k>
  static Bytes numbers(const std::byte* b, uint32_t) {
    const std::byte* first = b + 8 + k * kVectorBytes / 32 * 16;
    return lookup_bytes(kIq4Bytes.values, nibbles_of_blocks<k>(first, first + 16));
  }
};

struct TQ2_0Digits : Block256<DType::kTQ2_0> {
  static constexpr int kOffset = 0;
  static Groups<Eight> groups(const std::byte* b, uint32_t) { return {Eight{} + scale_at(b + 64), Eight{}}; }
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

constexpr int32_t kLargestInteger = 127 * (1 + kBase + kBase * kBase);

// v = kBase * (result) + rest, where the rest is a digit.
inline IntVec divide_by_base(IntVec v, IntVec& rest) {
  IntVec quotient = to_nearest(to_float(v) * (1.0f / kBase));
  rest = v - times_base(quotient);
  // It may be one too large, where the product above was rounded.
  const IntVec above = rest > 127, below = rest < 128 - kBase;
  rest += (below & kBase) - (above & kBase);
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
  if (from_bits(largest) * from_bits((276 - exponent) << 23) > static_cast<float>(kLargestInteger))
    ++exponent;
  return {from_bits((exponent - 22) << 23), from_bits((276 - exponent) << 23)};
}

void take_block(const float* x, uint32_t n, DigitBlock& out) {
  __builtin_memset(&out, 0, sizeof out);
  int32_t integers[256] = {};
  for (uint32_t group = 0; group < n / 32; ++group, x += 32) {
    const Unit unit = unit_of_32(x);
    out.units[group] = out.units_of_16[2 * group] = out.units_of_16[2 * group + 1] = unit.unit;
    for (int i = 0; i < 32; i += kLanes) {
      const IntVec whole = unit.scale > 0 ? to_nearest(load(x + i) * unit.scale) : IntVec{};
      __builtin_memcpy(integers + 32 * group + i, &whole, sizeof whole);
    }
  }
  int32_t high_parts[256], low_parts[256];
  for (int i = 0; i < 256; i += kLanes) {
    IntVec v, low, middle;
    __builtin_memcpy(&v, integers + i, sizeof v);
    const IntVec two = divide_by_base(v, low), high = divide_by_base(two, middle);
    int8_t* to = out.digits + i / kVectorBytes * 3 * kVectorBytes + i % kVectorBytes;
    put_digits(high, to);
    put_digits(middle, to + kVectorBytes);
    put_digits(low, to + 2 * kVectorBytes);
    __builtin_memcpy(high_parts + i, &two, sizeof two);
    __builtin_memcpy(low_parts + i, &low, sizeof low);
  }
  const auto four = [](const int32_t* v) { return (v[0] + v[1]) + (v[2] + v[3]); };
  int32_t fours[64];
  for (int i = 0; i < 64; ++i) {
    fours[i] = four(integers + 4 * i);
    out.eightfold[i] = 8 * fours[i];
    out.minus_high[i] = -128 * four(high_parts + 4 * i);
    out.minus_low[i] = -128 * four(low_parts + 4 * i);
  }
  // Of the integers, not of x: minima meet the same numbers as what they are taken off.
  for (int i = 0; i < 16; ++i)
    out.sums_of_16[i] = static_cast<float>(four(fours + 4 * i)) * out.units_of_16[i];
  for (int i = 0; i < 8; ++i) out.sums[i] = out.sums_of_16[2 * i] + out.sums_of_16[2 * i + 1];
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
inline __attribute__((always_inline)) void each_vector(const Call& call, std::integer_sequence<int, k...>) {
  (call(std::integral_constant<int, k>()), ...);
}

template <typename Format, int w_rows, int x_rows>
struct Sums {
  using Floats = typename Format::Floats;
  struct Sum {
    Vec products[2] = {};  // two hide the latency of the additions
    Floats taken = {};
  };
  Sum of[w_rows][x_rows];

  // 256 elements of each row of W, w_stride bytes apart: one block, or `count` <= 8.
  inline __attribute__((always_inline)) void add(const std::byte* b, size_t w_stride, uint32_t count,
                                                 const DigitBlock* x, size_t x_stride) {
    LaneFactors<Floats> factors[w_rows][x_rows];
    for (int c = 0; c < w_rows; ++c) {
      const Groups<Floats> groups = Format::groups(b + c * w_stride, count);
      for (int r = 0; r < x_rows; ++r) {
        const DigitBlock& block = x[r * x_stride];
        constexpr bool kOf32 = LaneFactors<Floats>::kGroup == 32;
        Floats of_x;
        load_floats(kOf32 ? block.units : block.units_of_16, of_x);
        factors[c][r].set(groups.scales * of_x);
        if constexpr (Format::kMinima) {
          load_floats(kOf32 ? block.sums : block.sums_of_16, of_x);
          add_product(of[c][r].taken, groups.minima, of_x);
        }
      }
    }
    each_vector(
        [&](auto constant) __attribute__((always_inline)) {
          constexpr int k = decltype(constant)::value;
          if (k * kVectorBytes >= static_cast<int>(32 * count)) return;
          for (int c = 0; c < w_rows; ++c) {
            const Bytes w = Format::template numbers<k>(b + c * w_stride, count);
            for (int r = 0; r < x_rows; ++r)
              of[c][r].products[k % 2] += product<k>(w, x[r * x_stride]) * factors[c][r].template at<k>();
          }
        },
        std::make_integer_sequence<int, 256 / kVectorBytes>());
  }

  float total(int c, int r) const {
    const float sum = sum_lanes(of[c][r].products[0] + of[c][r].products[1]);
    return Format::kMinima ? sum - sum_floats(of[c][r].taken) : sum;
  }

 private:
  static inline IntVec load_ints(const int32_t* p) {
    IntVec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  template <int k>
  static inline __attribute__((always_inline)) Vec product(Bytes w, const DigitBlock& x) {
    const int8_t* digits = x.digits + 3 * kVectorBytes * k;
    const Digits high = load_digits(digits), middle = load_digits(digits + kVectorBytes),
                 low = load_digits(digits + 2 * kVectorBytes);
    if constexpr (Format::kSigned) {
      // Two parts, since both together pass 32 bits: at most 4 * 255 * 128 * 256 and 4 * 255 * 128.
#if defined(__AVX512F__)  // the instruction takes numbers without signs: here 128 larger ones
      const IntVec upper = products_of_two(w, high, middle) + load_ints(x.minus_high + k * kLanes),
                   lower = add_products(load_ints(x.minus_low + k * kLanes), w, low);
#elif defined(__AVX2__)
      const Bytes bare = without_signs(w);
      const IntVec upper = products_of_two(bare, with_signs_of(w, high), with_signs_of(w, middle)),
                   lower = add_products(IntVec{}, bare, with_signs_of(w, low));
#else
      const IntVec upper = products_of_two(w, high, middle), lower = add_products(IntVec{}, w, low);
#endif
      return to_float(upper) * kBase + to_float(lower);
    } else {
      // At most 4 * 63 * kLargestInteger < 2^31.
      const IntVec sum = add_products(times_base(products_of_two(w, high, middle)), w, low);
      if constexpr (Format::kOffset < 0) {
        return to_float(sum);
      } else {
        constexpr int kUp = Format::kOffset - 3, kDown = -kUp;
        const IntVec of_x = load_ints(x.eightfold + k * kLanes);
        return to_float(sum - (kUp > 0 ? of_x << (kUp > 0 ? kUp : 0) : of_x >> (kDown > 0 ? kDown : 0)));
      }
    }
  }
};

template <typename Format, int w_rows, int x_rows>
void dot_rows(const std::byte* w, size_t w_stride, uint32_t n, const DigitBlock* x, size_t x_stride,
              float* out) {
  // Rows follow one another in memory, and the processor's own prefetcher falls behind.
  constexpr size_t kAhead = w_rows > 1 ? 2048 : 4096, kStepBytes = 256 / Format::kBlock * Format::kBytes;
  Sums<Format, w_rows, x_rows> sums;
  for (; n >= 256; n -= 256, w += kStepBytes, ++x) {
    for (int c = 0; c < w_rows; ++c)
      for (size_t line = 0; line < kStepBytes; line += 64)
        __builtin_prefetch(w + c * w_stride + kAhead + line);
    sums.add(w, w_stride, 8, x, x_stride);
  }
  if constexpr (Format::kBlock == 32)
    if (n > 0) sums.add(w, w_stride, n / 32, x, x_stride);
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

// Rows of 14336 numbers, two threads, GB/s, with 1, 2 and 4 streams: q6_K 15, 20 and 22 with VNNI. AVX2, with
// half the registers, gains nothing by more than two. Not measured on Arm.
#if defined(__AVX512F__)
constexpr uint32_t kStreams = 4;
#else
constexpr uint32_t kStreams = 2;
#endif
void dot_streams(DType type, const std::byte* w, size_t w_stride, uint32_t n, const DigitBlock* x,
                 float* out) {
  with_digits(type, [=](auto format) { dot_rows<decltype(format), kStreams, 1>(w, w_stride, n, x, 0, out); });
}

#endif

}  // namespace

extern const DigitKernels THIMBLE_DIGIT_KERNELS;
#ifdef THIMBLE_BYTE_PRODUCTS
const DigitKernels THIMBLE_DIGIT_KERNELS = {
#if defined(__AVX512VNNI__)
    .name = "vnni",
    .few_rows = 8,
#elif defined(__AVX2__)
    .name = "avx2",
    .few_rows = 4,
#else
    .name = "dotprod",
    .few_rows = 8,
#endif
    .streams = kStreams,
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
    .knows = [](DType) { return false; },
    .take = nullptr,
    .dot = nullptr,
    .dot_streams = nullptr,
};
#endif

}  // namespace thimble::cpu
