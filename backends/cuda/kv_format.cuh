// The formats of rows of keys and values. A format stores floats as a row and loads channels of a row as
// floats. Every kernel that reads or writes a row uses it through its template parameter Format;
// with_format() chooses it on the host. Row i of an array begins at rows + i * Format::row_units(head_dim).
//
// Kernels that copy rows through shared memory copy chunks: kChunkUnits units, 16 bytes, hold 8 channels.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// f16. Values beyond its range are replaced by its largest number and counted; NaN stays.
struct HalfRows {
  using Unit = __half;
  static constexpr uint32_t kChunkUnits = 8;
  static constexpr bool kHasHalves = true;  // halves() returns the chunk as it is
  __device__ static uint32_t row_units(uint32_t head_dim) { return head_dim; }

  // A warp calls this for neighbouring channels. Adds 1 to `beyond` if the value was replaced.
  __device__ static void store(Unit* row, uint32_t c, float x, uint32_t& beyond) {
    constexpr float kLargest = 65504;
    if (fabsf(x) > kLargest) {
      ++beyond;
      x = copysignf(kLargest, x);
    }
    row[c] = __float2half_rn(x);
  }
  __device__ static float load(const Unit* row, uint32_t c) { return __half2float(row[c]); }
  __device__ static __half load_half(const Unit* row, uint32_t c) { return row[c]; }
  // Channels 2 * pair and 2 * pair + 1.
  __device__ static float2 load_two(const Unit* row, uint32_t pair) {
    return __half22float2(reinterpret_cast<const __half2*>(row)[pair]);
  }
  // Channels [c, c + 4); c is a multiple of 4.
  __device__ static void load_four(const Unit* row, uint32_t c, float* x) {
    const uint2 words = *reinterpret_cast<const uint2*>(row + c);
    const float2 low = two(words.x), high = two(words.y);
    x[0] = low.x;
    x[1] = low.y;
    x[2] = high.x;
    x[3] = high.y;
  }
  // The channels of a chunk as floats, and as f16 for tensor cores.
  __device__ static void widen(const uint4& chunk, float (&x)[8]) {
    const __half2* h = reinterpret_cast<const __half2*>(&chunk);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float2 f = __half22float2(h[i]);
      x[2 * i] = f.x;
      x[2 * i + 1] = f.y;
    }
  }
  __device__ static uint4 halves(const uint4& chunk) { return chunk; }

 private:
  __device__ static float2 two(const uint32_t& halves) {
    return __half22float2(reinterpret_cast<const __half2&>(halves));
  }
};

#ifdef THIMBLE_TEST_FORMATS
// bf16: shows that kernels depend on a format only through this file. Only tests use it.
struct BrainRows {
  using Unit = __nv_bfloat16;
  static constexpr uint32_t kChunkUnits = 8;
  static constexpr bool kHasHalves = false;
  __device__ static uint32_t row_units(uint32_t head_dim) { return head_dim; }

  __device__ static void store(Unit* row, uint32_t c, float x, uint32_t&) { row[c] = __float2bfloat16_rn(x); }
  __device__ static float load(const Unit* row, uint32_t c) { return __bfloat162float(row[c]); }
  __device__ static __half load_half(const Unit* row, uint32_t c) { return __float2half_rn(load(row, c)); }
  __device__ static float2 load_two(const Unit* row, uint32_t pair) {
    return {load(row, 2 * pair), load(row, 2 * pair + 1)};
  }
  __device__ static void load_four(const Unit* row, uint32_t c, float* x) {
    for (uint32_t i = 0; i < 4; ++i) x[i] = load(row, c + i);
  }
  __device__ static void widen(const uint4& chunk, float (&x)[8]) {
    const Unit* of = reinterpret_cast<const Unit*>(&chunk);
    for (uint32_t i = 0; i < 8; ++i) x[i] = load(of, i);
  }
  __device__ static uint4 halves(const uint4& chunk) {
    float x[8];
    widen(chunk, x);
    uint4 result;
    __half2* const to = reinterpret_cast<__half2*>(&result);
    for (uint32_t i = 0; i < 4; ++i) to[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    return result;
  }
};
#endif

// Calls call(format) with the format of rows of a type, which is in the list of backends/kv_formats.h.
template <typename Call>
void with_format(DType type, const Call& call) {
#ifdef THIMBLE_TEST_FORMATS
  if (type == DType::kBF16) return call(BrainRows{});
#else
  (void)type;
#endif
  call(HalfRows{});
}

}  // namespace thimble::cuda
