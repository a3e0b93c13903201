// The operands of a tensor core product: rows of x, scaled, and rows of W, of any type, as f16.
//
// A thread makes 8 neighbouring elements, the 16 bytes of a store. In every block format these are one byte
// or nibble of 8 neighbouring bytes, with one scale and one offset; backends/cpu/isa/dequant.h defines the
// formats.
#include "backends/cuda/dense/dense.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kRowsAtOnce = 4;  // of W to a thread, so that enough loads are under way

// Two f16, to nearest even; what is too large becomes 65504.
__device__ inline uint32_t pack(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline uint32_t byte_at(const std::byte* p) { return *reinterpret_cast<const uint8_t*>(p); }
__device__ inline float half_at(const std::byte* p) {
  return __half2float(*reinterpret_cast<const __half*>(p));
}
__device__ inline float2 halves(uint32_t bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// 8 bytes from an even address. Where it is no multiple of 4, the words around them: each holds some of the
// 8, so none lies outside of what the matrix's memory ends with.
__device__ inline uint2 eight_bytes(const std::byte* p) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t(3));
  const bool between = address & 2;
  const uint32_t shift = between ? 16 : 0, last = between ? words[2] : 0;
  return {__funnelshift_r(words[0], words[1], shift), __funnelshift_r(words[1], last, shift)};
}
__device__ inline uint2 nibbles(uint2 bytes, bool high) {
  const uint32_t shift = high ? 4 : 0;
  return {bytes.x >> shift & 0x0f0f0f0f, bytes.y >> shift & 0x0f0f0f0f};
}
// The low 4 bits of `bits` as the fifth bits of 4 bytes.
__device__ inline uint32_t fifth_bits(uint32_t bits) {
  return (bits & 1) << 4 | (bits & 2) << 11 | (bits & 4) << 18 | (bits & 8) << 25;
}

// Eight elements: scale * q + offset, q in 0...255. One rounding, so d * q - 8 d is d * (q - 8) to the bit.
struct Eight {
  uint2 q;
  float scale, offset;

  // As the last bits of 2^23, a byte is a float without a conversion, of which older cards do 16 a clock.
  __device__ float at(uint32_t i) const {
    const uint32_t bits = __byte_perm(i < 4 ? q.x : q.y, 0x4b000000, 0x7540 | i % 4);
    return fmaf(scale, __uint_as_float(bits) - 0x1p23f, offset);
  }
  __device__ uint4 as_f16() const {
    return {pack(at(0), at(1)), pack(at(2), at(3)), pack(at(4), at(5)), pack(at(6), at(7))};
  }
};

// The scale and minimum of group g of 8, from the first 16 bytes of a q4_K or q5_K block: d, m, then 12 bytes
// of scales.
__device__ inline float2 group_scale(uint4 head, uint32_t g) {
  const uint32_t shift = 8 * (g % 4), a = head.y >> shift & 255, b = head.z >> shift & 255,
                 c = head.w >> shift & 255;
  const uint32_t scale = g < 4 ? a & 63 : (c & 15) | a >> 6 << 4,
                 least = g < 4 ? b & 63 : c >> 4 | b >> 6 << 4;
  const float2 d = halves(head.x);
  return {d.x * float(scale), d.y * float(least)};
}

// Elements [8 i, 8 i + 8) of block b.
template <DType type>
__device__ inline Eight eight_of_block(const std::byte* b, uint32_t i) {
  if constexpr (type == DType::kQ8_0) {
    const uint2 q = eight_bytes(b + 2 + 8 * i);
    const float d = half_at(b);
    return {{q.x ^ 0x80808080, q.y ^ 0x80808080}, d, -128 * d};
  } else if constexpr (type == DType::kQ4_0) {
    const float d = half_at(b);
    return {nibbles(eight_bytes(b + 2 + 8 * (i & 1)), i & 2), d, -8 * d};
  } else if constexpr (type == DType::kQ4_1) {
    return {nibbles(eight_bytes(b + 4 + 8 * (i & 1)), i & 2), half_at(b), half_at(b + 2)};
  } else if constexpr (type == DType::kQ5_0) {
    uint2 q = nibbles(eight_bytes(b + 6 + 8 * (i & 1)), i & 2);
    const uint32_t fifth = byte_at(b + 2 + i);
    const float d = half_at(b);
    return {{q.x | fifth_bits(fifth), q.y | fifth_bits(fifth >> 4)}, d, -16 * d};
  } else if constexpr (type == DType::kQ5_1) {
    const uint2 q = nibbles(eight_bytes(b + 8 + 8 * (i & 1)), i & 2);
    const uint32_t fifth = byte_at(b + 4 + i);
    return {{q.x | fifth_bits(fifth), q.y | fifth_bits(fifth >> 4)}, half_at(b), half_at(b + 2)};
  } else if constexpr (type == DType::kQ4_K) {
    const float2 s = group_scale(*reinterpret_cast<const uint4*>(b), i / 4);
    return {nibbles(*reinterpret_cast<const uint2*>(b + 16 + 32 * (i / 8) + 8 * (i % 4)), i & 4), s.x, -s.y};
  } else if constexpr (type == DType::kQ5_K) {
    const float2 s = group_scale(*reinterpret_cast<const uint4*>(b), i / 4);
    const uint2 q = nibbles(*reinterpret_cast<const uint2*>(b + 48 + 32 * (i / 8) + 8 * (i % 4)), i & 4);
    const uint2 fifth = *reinterpret_cast<const uint2*>(b + 16 + 8 * (i % 4));
    const uint32_t g = i / 4;
    return {{q.x | (fifth.x >> g & 0x01010101) << 4, q.y | (fifth.y >> g & 0x01010101) << 4}, s.x, -s.y};
  } else {
    static_assert(type == DType::kQ6_K);
    // Each half of the block: 4 quarters of 32 elements. Two share 32 bytes of nibbles, all four the 32 of
    // pairs of bits.
    const uint32_t half = i / 16, quarter = i / 4 % 4, j = 8 * (i % 4);
    const uint2 q = nibbles(eight_bytes(b + 64 * half + 32 * (quarter & 1) + j), quarter & 2);
    const uint2 high = eight_bytes(b + 128 + 32 * half + j);
    const float scale = half_at(b + 208) * float(static_cast<int8_t>(byte_at(b + 192 + i / 2)));
    const auto bits = [&](uint32_t pairs) { return (pairs >> 2 * quarter & 0x03030303) << 4; };
    return {{q.x | bits(high.x), q.y | bits(high.y)}, scale, -32 * scale};
  }
}

__device__ inline float float_at(const float* p) { return *p; }
__device__ inline float float_at(const __half* p) { return __half2float(*p); }
__device__ inline float float_at(const __nv_bfloat16* p) { return __bfloat162float(*p); }

// Elements [e, e + 8) of a row of n elements; zero from n on.
template <typename T>
__device__ inline uint4 eight_of_floats(const T* row, uint32_t e, uint32_t n) {
  float v[8];
  if (e + 8 <= n && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
    struct alignas(16) {
      T at[8];
    } wide;
#pragma unroll
    for (uint32_t i = 0; i < sizeof wide / 16; ++i)
      reinterpret_cast<uint4*>(&wide)[i] = reinterpret_cast<const uint4*>(row + e)[i];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v[i] = float_at(&wide.at[i]);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v[i] = e + i < n ? float_at(row + e + i) : 0;
  }
  return {pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])};
}

template <DType type>
__device__ inline uint4 eight_of_row(const std::byte* row, uint32_t e, uint32_t n) {
  if constexpr (type == DType::kF32) {
    return eight_of_floats(reinterpret_cast<const float*>(row), e, n);
  } else if constexpr (type == DType::kF16) {
    return eight_of_floats(reinterpret_cast<const __half*>(row), e, n);
  } else if constexpr (type == DType::kBF16) {
    return eight_of_floats(reinterpret_cast<const __nv_bfloat16*>(row), e, n);
  } else {
    constexpr bool large = type == DType::kQ4_K || type == DType::kQ5_K || type == DType::kQ6_K;
    constexpr uint32_t block = large ? 256 : 32;
    constexpr uint32_t block_bytes = type == DType::kQ8_0   ? 34
                                     : type == DType::kQ4_0 ? 18
                                     : type == DType::kQ4_1 ? 20
                                     : type == DType::kQ5_0 ? 22
                                     : type == DType::kQ5_1 ? 24
                                     : type == DType::kQ4_K ? 144
                                     : type == DType::kQ5_K ? 176
                                                            : 210;
    return eight_of_block<type>(row + uint64_t(e / block) * block_bytes, e % block / 8).as_f16();
  }
}

struct Rows {
  const std::byte* w;
  uint64_t row_bytes;
  uint32_t in_cols, rows;
  __half* to;
  uint32_t k;
  bool in_groups;
  uint32_t col_blocks;  // blocks side by side
};

template <DType type>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(Rows r) {
  release_successor();
  const uint32_t e = 8 * (blockIdx.x % r.col_blocks * kThreads + threadIdx.x);
  const uint32_t first = blockIdx.x / r.col_blocks * kRowsAtOnce;
  const bool there = e < r.in_cols;
  uint4 v[kRowsAtOnce];
#pragma unroll
  for (uint32_t i = 0; i < kRowsAtOnce;
       ++i) {  // without a branch, so that the loads of all rows are under way at once
    const uint32_t row = min(first + i, r.rows - 1);
    v[i] = eight_of_row<type>(r.w + row * r.row_bytes, there ? e : 0, r.in_cols);
  }
  await_predecessor();
#pragma unroll
  for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
    const uint32_t row = first + i, to = r.in_groups ? row / 8 * 16 + row % 8 : row;
    if (row < r.rows && e < r.k)
      *reinterpret_cast<uint4*>(r.to + uint64_t(to) * r.k + e) = there ? v[i] : uint4{};
  }
}

constexpr uint32_t kMostThreads = 1024;  // to a row of x
constexpr uint32_t kHeld = 4;            // times 8 elements of it that a thread keeps

// Elements [e, e + 8) of a row of x, zero from n on. `wide`: the row is aligned to 16 bytes, n a multiple
// of 8.
template <bool wide>
__device__ inline void load_eight(float (&v)[8], const float* row, uint32_t e, uint32_t n) {
  if constexpr (wide) {
    const float4* from = reinterpret_cast<const float4*>(row + e);
    const float4 a = e < n ? from[0] : float4{}, b = e < n ? from[1] : float4{};
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v[i] = e + i < n ? row[e + i] : 0;
  }
}
__device__ inline void store_eight(__half* to, const float (&v)[8], float scale) {
  __half2 pairs[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(scale * v[2 * i], scale * v[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(pairs);
}

// A block takes a row, as many threads of it as hold the row between finding its largest magnitude and
// scaling it; what a row of more than 32768 elements has beyond them is read twice.
template <bool wide>
__global__ void __launch_bounds__(kMostThreads)
    scale_rows_kernel(const StepParams* step, const float* x, uint32_t x_stride, uint32_t in_cols,
                      uint32_t first_row, uint32_t rows, __half* to, uint32_t k, float* scales) {
  __shared__ uint32_t of_warps[kMostThreads / kWarp];
  begin_kernel();
  const uint32_t row = blockIdx.x;
  if (row >= product_rows(*step, first_row, rows)) return;
  x += uint64_t(first_row + row) * x_stride;
  to += uint64_t(row) * k;

  const uint32_t first = 8 * threadIdx.x, step_elements = 8 * blockDim.x,
                 behind = first + kHeld * step_elements;
  float held[kHeld][8];
#pragma unroll
  for (uint32_t i = 0; i < kHeld; ++i) load_eight<wide>(held[i], x, first + i * step_elements, in_cols);
  uint32_t largest = 0;  // as bits, in whose order infinities and NaN are above all numbers
  const auto count = [&](const float(&v)[8]) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffff);
  };
#pragma unroll
  for (uint32_t i = 0; i < kHeld; ++i) count(held[i]);
  for (uint32_t e = behind; e < k; e += step_elements) {
    float more[8];
    load_eight<wide>(more, x, e, in_cols);
    count(more);
  }
  largest = __reduce_max_sync(~0u, largest);
  const uint32_t lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  if (lane == 0) of_warps[threadIdx.x / kWarp] = largest;
  __syncthreads();
  largest = __reduce_max_sync(~0u, lane < warps ? of_warps[lane] : 0);

  // A power of two is its exponent + 127 in bits 23-30: 14 is wanted of the largest. A row below 2^-112, or
  // of zeros, is scaled like one of 2^-112, so that both scales have exponents.
  const uint32_t exponent = max(largest >> 23, 15);
  const float scale = __uint_as_float((2 * 127 + 14 - exponent) << 23);
  if (threadIdx.x == 0) scales[row] = __uint_as_float((exponent - 14) << 23);
#pragma unroll
  for (uint32_t i = 0; i < kHeld; ++i)
    if (const uint32_t e = first + i * step_elements; e < k) store_eight(to + e, held[i], scale);
  for (uint32_t e = behind; e < k; e += step_elements) {
    float more[8];
    load_eight<wide>(more, x, e, in_cols);
    store_eight(to + e, more, scale);
  }
}

using DequantizeKernel = void (*)(Rows);
DequantizeKernel kernel_of(DType type) {
  switch (type) {
    case DType::kF32:
      return dequantize_kernel<DType::kF32>;
    case DType::kF16:
      return dequantize_kernel<DType::kF16>;
    case DType::kBF16:
      return dequantize_kernel<DType::kBF16>;
    case DType::kQ8_0:
      return dequantize_kernel<DType::kQ8_0>;
    case DType::kQ4_0:
      return dequantize_kernel<DType::kQ4_0>;
    case DType::kQ4_1:
      return dequantize_kernel<DType::kQ4_1>;
    case DType::kQ5_0:
      return dequantize_kernel<DType::kQ5_0>;
    case DType::kQ5_1:
      return dequantize_kernel<DType::kQ5_1>;
    case DType::kQ4_K:
      return dequantize_kernel<DType::kQ4_K>;
    case DType::kQ5_K:
      return dequantize_kernel<DType::kQ5_K>;
    case DType::kQ6_K:
      return dequantize_kernel<DType::kQ6_K>;
  }
  return nullptr;
}

}  // namespace

void scale_rows(const Launch& l, const Operands& o, const float* x, uint32_t x_stride, uint32_t in_cols,
                uint32_t first_row, uint32_t rows) {
  const bool wide = reinterpret_cast<uintptr_t>(x) % 16 == 0 && x_stride % 4 == 0 && in_cols % 8 == 0;
  const uint64_t threads = round_up(ceil_div(o.k, 8 * kHeld), kWarp);
  launch(l, wide ? scale_rows_kernel<true> : scale_rows_kernel<false>, rows,
         static_cast<uint32_t>(std::min<uint64_t>(threads, kMostThreads)), 0, l.step, x, x_stride, in_cols,
         first_row, rows, o.x(l), o.k, o.x_scales(l));
}

void dequantize(const Launch& l, const Weight& w, uint32_t first, uint32_t rows, __half* to, uint32_t k,
                bool in_groups) {
  const uint64_t row_bytes = dtype_bytes(w.type, w.cols);
  const uint32_t col_blocks = static_cast<uint32_t>(ceil_div(k / 8, kThreads));
  const uint32_t blocks = col_blocks * static_cast<uint32_t>(ceil_div(rows, kRowsAtOnce));
  const Rows r{data<std::byte>(w) + first * row_bytes, row_bytes, w.cols, rows, to, k, in_groups, col_blocks};
  launch(l, kernel_of(w.type), blocks, kThreads, 0, r);
}

}  // namespace thimble::cuda
