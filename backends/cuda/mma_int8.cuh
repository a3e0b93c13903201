// Tensor core instructions on bytes with exact integer sums, on every card from sm_80 on. Device side.
#pragma once

#include <cstdint>

namespace thimble::cuda {

// c[16][8] = a[16][32] b[32][8]; a has unsigned or signed bytes, b signed ones. Lane 4r + p passes four bytes
// per register: a0, a1 are columns 4p.. of rows r and r + 8; a2, a3 columns 16 + 4p.. of these rows; b0, b1
// rows 4p.. and 16 + 4p.. of column r. It receives columns 2p and 2p + 1 of row r (c[0], c[1]) and of row r +
// 8 (c[2], c[3]).
template <bool kSigned>
__device__ inline void multiply_bytes(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                      uint32_t b0, uint32_t b1) {
  if constexpr (kSigned)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, "
        "%10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, "
        "%10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}
// c[16][8] = a[16][16] b[16][8]: the same without the second halves.
template <bool kSigned>
__device__ inline void multiply_bytes(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  if constexpr (kSigned)
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(0));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

// Byte i of a word, sign-extended; one instruction if i is a constant.
__device__ inline int32_t signed_byte_of(uint32_t word, uint32_t i) {
  int32_t byte;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(byte) : "r"(word), "r"(0x8880 + 0x1111 * i));
  return byte;
}

}  // namespace thimble::cuda
