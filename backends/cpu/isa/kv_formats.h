// The formats of rows of keys and values, for one instruction set. A format stores floats as a row and loads
// channels of a row as floats. Every op that reads or writes a row uses it through KvFormat (kv_kernels.h).
// See vector.h for what this file must not include.
#pragma once

#include "backends/cpu/isa/vector.h"
#include "base/dtype.h"

#if !defined(__F16C__)
#include "base/bits.h"
#endif

namespace thimble::cpu {
namespace {

inline void store(uint16_t* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = f32_to_f16(v[i]);
#endif
}
// The first n < kLanes values at p, with `fill` in the other lanes.
template <typename T>
inline Vec load_some(const T* p, uint32_t n, T fill) {
  T lanes[kLanes];
  for (uint32_t i = 0; i < kLanes; ++i) lanes[i] = i < n ? p[i] : fill;
  return load(lanes);
}
template <typename T>
inline void store_some(T* p, Vec v, uint32_t n) {
  T lanes[kLanes];
  store(lanes, v);
  for (uint32_t i = 0; i < n; ++i) p[i] = lanes[i];
}

// f16. Values beyond its range are replaced by its largest number and counted; NaN stays.
struct HalfRows {
  static constexpr DType kType = DType::kF16;

  // Channels [c, c + kLanes) of a row, or the first n < kLanes of them and zeros.
  static Vec load(const std::byte* row, uint32_t c) { return load_halves(row + c * sizeof(uint16_t)); }
  static Vec load_some(const std::byte* row, uint32_t c, uint32_t n) {
    return cpu::load_some<uint16_t>(reinterpret_cast<const uint16_t*>(row) + c, n, 0);
  }
  static uint32_t store_row(const float* x, std::byte* row, uint32_t n) {
    uint16_t* const y = reinterpret_cast<uint16_t*>(row);
    constexpr float kLargest = 65504;
    IntVec beyond{};
    const auto bounded = [&](Vec v) {
      beyond -= (v > kLargest) | (v < -kLargest);  // a lane that compares true is -1
      v = v > kLargest ? broadcast(kLargest) : v;
      return v < -kLargest ? broadcast(-kLargest) : v;
    };
    uint32_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, bounded(cpu::load(x + i)));
    if (i < n) store_some(y + i, bounded(cpu::load_some<float>(x + i, n - i, 0)), n - i);
    uint32_t count = 0;
    for (int lane = 0; lane < kLanes; ++lane) count += static_cast<uint32_t>(beyond[lane]);
    return count;
  }
};

// f32: the rows of the view that prefill attends to.
struct FloatRows {
  static constexpr DType kType = DType::kF32;

  static Vec load(const std::byte* row, uint32_t c) {
    return cpu::load(reinterpret_cast<const float*>(row) + c);
  }
  static Vec load_some(const std::byte* row, uint32_t c, uint32_t n) {
    return cpu::load_some<float>(reinterpret_cast<const float*>(row) + c, n, 0);
  }
  static uint32_t store_row(const float* x, std::byte* row, uint32_t n) {
    __builtin_memcpy(row, x, n * sizeof(float));
    return 0;
  }
};

inline float half_at(const std::byte* p) {
  uint16_t h;
  __builtin_memcpy(&h, p, sizeof h);
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  return f16_to_f32(h);
#endif
}
inline uint16_t to_half(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
#else
  return f32_to_f16(x);
#endif
}
// The nearest integer of x, ties to even, between `least` and `most`; adding 1.5 * 2^23 rounds.
inline int32_t nearest(float x, float least, float most) {
  const float rounded = (x + 0x1.8p23f) - 0x1.8p23f;
  return static_cast<int32_t>(rounded > most ? most : rounded >= least ? rounded : least);  // NaN: least
}

constexpr uint32_t kBlock = 32;
constexpr int kBlockVecs = kBlock / kLanes;

// Multiplies a block by the Hadamard matrix H of 32 rows, whose elements are 1 and -1. All instruction sets
// add in the same order, from channels that are 16 apart to neighbours, so they store the same bits.
template <int G, int... I>
inline Vec add_and_subtract(Vec v, std::integer_sequence<int, I...>) {
  constexpr Vec kSigns = {I & G ? -1.0f : 1.0f ...};
  return __builtin_shufflevector(v, v, (I ^ G)...) + v * kSigns;
}
template <int G = kLanes / 2>
inline Vec transform_lanes(Vec v) {
  if constexpr (G == 0)
    return v;
  else
    return transform_lanes<G / 2>(add_and_subtract<G>(v, std::make_integer_sequence<int, kLanes>()));
}
inline void hadamard(Vec (&v)[kBlockVecs]) {
#pragma GCC unroll 8
  for (int step = kBlockVecs / 2; step > 0; step /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < kBlockVecs; ++i) {
      if (i & step) continue;
      const Vec a = v[i], b = v[i + step];
      v[i] = a + b;
      v[i + step] = a - b;
    }
#pragma GCC unroll 8
  for (int i = 0; i < kBlockVecs; ++i) v[i] = transform_lanes(v[i]);
}

// Rows of blocks of 32 channels x. A block stores y = H x / 8 as integer codes times a scale, an f16. It is
// loaded as x = H y / 4, because H H = 32. Both factors are exact, and keep the scale within the range of
// f16. H spreads a channel that is much larger than the others over the block, where it would leave them few
// codes. H does not commute with RoPE, which turns each pair of channels by an angle of its own, so every
// load undoes it: a format is known to this file alone.
//
// The number in y with the largest magnitude gets the lowest code. A NaN makes the scale, and so the whole
// block, NaN. Values beyond the range of f16 are replaced by its largest number and counted.
//
// A row has the codes of all its n channels, from the lowest bits on, and then the scales of all its blocks.
// If their number is odd, two zero bytes follow, so that GPUs can read whole words. kv_bytes() has the sizes.
template <typename Codes>
struct BlockRows {
  static constexpr DType kType = Codes::kType;

  // Loads channels [c, c + kBlock) of a row of n.
  static void load_block(const std::byte* row, uint32_t n, uint32_t c, float* x) {
    const std::byte* codes = row + bytes_of(c);
    Vec v[kBlockVecs];
    for (int i = 0; i < kBlockVecs; ++i) v[i] = Codes::load(codes + i * kLanes * Codes::kBits / 8);
    hadamard(v);
    const float scale = half_at(row + scale_at(n, c)) / 4;
    for (int i = 0; i < kBlockVecs; ++i) store(x + i * kLanes, v[i] * scale);
  }
  static uint32_t store_row(const float* x, std::byte* row, uint32_t n) {
    constexpr float kLargest = 65504;
    uint32_t beyond = 0;
    for (uint32_t c = 0; c < n; c += kBlock) {
      float y[kBlock];
      for (uint32_t i = 0; i < kBlock; ++i) {
        const float channel = x[c + i];
        beyond += channel > kLargest || channel < -kLargest;
        y[i] = channel > kLargest ? kLargest : channel < -kLargest ? -kLargest : channel;
      }
      Vec v[kBlockVecs];
      for (int i = 0; i < kBlockVecs; ++i) v[i] = cpu::load(y + i * kLanes);
      hadamard(v);
      for (int i = 0; i < kBlockVecs; ++i) store(y + i * kLanes, v[i] * 0.125f);
      store_block(y, row + bytes_of(c), row + scale_at(n, c));
    }
    if (n / kBlock % 2) __builtin_memset(row + scale_at(n, n), 0, kScaleBytes);
    return beyond;
  }

 private:
  static constexpr uint32_t kScaleBytes = 2;

  static uint32_t bytes_of(uint32_t codes) { return codes * Codes::kBits / 8; }
  // Where the scale of channel c is in a row of n.
  static uint32_t scale_at(uint32_t n, uint32_t c) { return bytes_of(n) + c / kBlock * kScaleBytes; }

  static void store_block(const float (&y)[kBlock], std::byte* codes_to, std::byte* scale_to) {
    float largest = 0, nan = 0;
    for (const float v : y) {
      largest = __builtin_fabsf(v) > __builtin_fabsf(largest) ? v : largest;
      nan += v - v;
    }
    const uint16_t half = to_half(largest / Codes::kLowest + nan);
    __builtin_memcpy(scale_to, &half, kScaleBytes);
    const float scale = half_at(scale_to), steps = scale < 0 || scale > 0 ? 1 / scale : 0;
    int32_t codes[kBlock];
    for (uint32_t i = 0; i < kBlock; ++i) codes[i] = nearest(y[i] * steps, Codes::kLowest, Codes::kHighest);
    Codes::store(codes, codes_to);
  }
};

// q8_0: a code is a signed byte.
struct ByteCodes {
  static constexpr DType kType = DType::kQ8_0;
  static constexpr uint32_t kBits = 8;
  static constexpr int kLowest = -127, kHighest = 127;

  static Vec load(const std::byte* from) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes codes;
    __builtin_memcpy(&codes, from, sizeof codes);
    return __builtin_convertvector(__builtin_convertvector(codes, IntVec), Vec);
  }
  static void store(const int32_t (&codes)[kBlock], std::byte* to) {
    for (uint32_t i = 0; i < kBlock; ++i) to[i] = static_cast<std::byte>(codes[i] & 0xff);
  }
};

// q4_0: a code is four bits, which are 8 more than it.
struct NibbleCodes {
  static constexpr DType kType = DType::kQ4_0;
  static constexpr uint32_t kBits = 4;
  static constexpr int kLowest = -8, kHighest = 7;

  static Vec load(const std::byte* from) { return load(from, std::make_integer_sequence<int, kLanes>()); }
  static void store(const int32_t (&codes)[kBlock], std::byte* to) {
    for (uint32_t i = 0; i < kBlock; i += 2)
      to[i / 2] = static_cast<std::byte>((codes[i] + 8) | (codes[i + 1] + 8) << 4);
  }

 private:
  template <int... I>
  static Vec load(const std::byte* from, std::integer_sequence<int, I...>) {
    typedef int32_t Words __attribute__((vector_size(16)));
    constexpr IntVec kShifts = {I % 8 * 4 ...};
    Words words{};
    __builtin_memcpy(&words, from, kLanes / 2);
    const IntVec nibbles = __builtin_shufflevector(words, words, (I / 8)...) >> kShifts & 15;
    return __builtin_convertvector(nibbles - 8, Vec);
  }
};

#ifdef THIMBLE_TEST_FORMATS
// bf16: the format that only tests use, on all backends.
struct BrainRows {
  static constexpr DType kType = DType::kBF16;

  static Vec load(const std::byte* row, uint32_t c) {
    return reinterpret_cast<Vec>(load_words(row + c * sizeof(uint16_t)) << 16);
  }
  static Vec load_some(const std::byte* row, uint32_t c, uint32_t n) {
    uint16_t lanes[kLanes] = {};
    __builtin_memcpy(lanes, row + c * sizeof(uint16_t), n * sizeof(uint16_t));
    return load(reinterpret_cast<const std::byte*>(lanes), 0);
  }
  static uint32_t store_row(const float* x, std::byte* row, uint32_t n) {
    for (uint32_t c = 0; c < n; ++c) {
      uint32_t bits;
      __builtin_memcpy(&bits, x + c, sizeof bits);
      const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
      const uint16_t y = x[c] == x[c] ? static_cast<uint16_t>(rounded) : 0x7fc0;
      __builtin_memcpy(row + c * sizeof y, &y, sizeof y);
    }
    return 0;
  }
};
#endif

template <typename... Formats>
struct FormatList {};
#ifdef THIMBLE_TEST_FORMATS
using AllFormats = FormatList<HalfRows, FloatRows, BlockRows<ByteCodes>, BlockRows<NibbleCodes>, BrainRows>;
#else
using AllFormats = FormatList<HalfRows, FloatRows, BlockRows<ByteCodes>, BlockRows<NibbleCodes> >;
#endif

// Whether a format loads a block as a whole, instead of a vector.
template <typename Format>
concept WholeBlocks = requires {
  Format::load_block;
};

template <typename Format>
void load_row(const std::byte* row, float* y, uint32_t n) {
  uint32_t c = 0;
  if constexpr (WholeBlocks<Format>) {
    for (; c < n; c += kBlock) Format::load_block(row, n, c, y + c);
  } else {
    for (; c + kLanes <= n; c += kLanes) store(y + c, Format::load(row, c));
    if (c < n) store_some(y + c, Format::load_some(row, c, n - c), n - c);
  }
}

}  // namespace
}  // namespace thimble::cpu
