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
using AllFormats = FormatList<HalfRows, FloatRows, BrainRows>;
#else
using AllFormats = FormatList<HalfRows, FloatRows>;
#endif

template <typename Format>
void load_row(const std::byte* row, float* y, uint32_t n) {
  uint32_t c = 0;
  for (; c + kLanes <= n; c += kLanes) store(y + c, Format::load(row, c));
  if (c < n) store_some(y + c, Format::load_some(row, c, n - c), n - c);
}

}  // namespace
}  // namespace thimble::cpu
