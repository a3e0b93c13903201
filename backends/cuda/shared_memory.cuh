// Shared memory by 32-bit addresses, and values that a loop must not compute again. From Hopper on, the
// address of an array in shared memory depends on the block's rank in its cluster, and compilers read that
// rank again for every access. Device side.
#pragma once

#include <cstdint>

#include "backends/cuda/mma.cuh"

namespace thimble::cuda {

// Returns the value in a way that makes the compiler keep it instead of computing it again at each use.
__device__ inline uint32_t kept(uint32_t value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}
__device__ inline int64_t kept(int64_t value) {
  asm volatile("mov.u64 %0, %0;" : "+l"(value));
  return value;
}

// Loads and stores of 4 bytes, of 8 and 16 bytes (aligned), of a byte, and of an f16 and its bits.
__device__ inline uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ inline uint2 load_two_words(uint32_t address) {
  uint2 w;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "r"(address) : "memory");
  return w;
}
__device__ inline uint4 load_words(uint32_t address) {
  uint4 w;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(address)
               : "memory");
  return w;
}
__device__ inline float load_float(uint32_t address) { return __uint_as_float(load_word(address)); }
__device__ inline uint16_t load_half_bits(uint32_t address) {
  uint16_t bits;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
  return bits;
}
__device__ inline float load_half(uint32_t address) {
  return __half2float(__ushort_as_half(load_half_bits(address)));
}
__device__ inline uint32_t load_byte(uint32_t address) {
  uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address) : "memory");
  return byte;
}
__device__ inline void store_words(uint32_t address, uint4 w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w.x), "r"(w.y), "r"(w.z),
               "r"(w.w)
               : "memory");
}
__device__ inline void store_float(uint32_t address, float f) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(f) : "memory");
}

// Copies 16 bytes that will be read once, or the first `bytes` of them followed by zeros; addresses are
// multiples of 16.
__device__ inline void copy_async_once(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copy_async_once(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

}  // namespace thimble::cuda
