// The tensor types that weights may have, for C++, CUDA and GLSL: X(name, number in GGUF, elements per block,
// bytes per block). A tensor row holds whole blocks.
//
// A new type needs a row here and the meaning of its blocks in three places: backends/cpu/isa/dequant.h (the
// definition), backends/cuda/dense/formats.cuh and backends/vulkan/shaders/dense/formats.glsl.
#ifndef THIMBLE_BASE_DTYPE_LIST_H
#define THIMBLE_BASE_DTYPE_LIST_H

#define THIMBLE_DTYPES(X) \
  X(F32, 0, 1, 4)         \
  X(F16, 1, 1, 2)         \
  X(BF16, 30, 1, 2)       \
  X(Q8_0, 8, 32, 34)      \
  X(Q4_0, 2, 32, 18)      \
  X(Q4_1, 3, 32, 20)      \
  X(Q5_0, 6, 32, 22)      \
  X(Q5_1, 7, 32, 24)      \
  X(IQ4_NL, 20, 32, 18)   \
  X(MXFP4, 39, 32, 17)    \
  X(NVFP4, 40, 64, 36)    \
  X(Q2_K, 10, 256, 84)    \
  X(Q3_K, 11, 256, 110)   \
  X(Q4_K, 12, 256, 144)   \
  X(Q5_K, 13, 256, 176)   \
  X(Q6_K, 14, 256, 210)   \
  X(IQ4_XS, 23, 256, 136) \
  X(IQ3_S, 21, 256, 110)  \
  X(IQ3_XXS, 18, 256, 98) \
  X(IQ2_S, 22, 256, 82)   \
  X(IQ2_XS, 17, 256, 74)  \
  X(IQ2_XXS, 16, 256, 66) \
  X(IQ1_M, 29, 256, 56)   \
  X(IQ1_S, 19, 256, 50)   \
  X(TQ2_0, 35, 256, 66)   \
  X(TQ1_0, 34, 256, 54)   \
  X(Q2_0, 42, 64, 18)     \
  X(Q1_0, 41, 128, 18)

#endif
