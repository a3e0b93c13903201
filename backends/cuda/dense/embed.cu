// embed: a row of the embedding table for every token.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256;

__device__ float half_at(const uint8_t* p) { return __half2float(*reinterpret_cast<const __half*>(p)); }
// A fifth bit's worth, 0 or 16: bit i of little-endian bits.
__device__ int fifth_bit(const uint8_t* bits, uint32_t i) { return (bits[i / 8] >> (i % 8) & 1) << 4; }

// Element i (of 32) of the types of 4 and 5 bits: the low halves of 16 bytes are elements 0 to 15, the high
// halves the others.
__device__ int nibble(const uint8_t* q, uint32_t i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }

// Element i (of 256) of q4_K, and of q5_K whose quants lie after 32 bytes of fifth bits: bit g of byte j
// belongs to element j of group g. Two groups of 32 share 32 bytes; the 6-bit scale and minimum of a group
// lie in 12 bytes, see backends/cpu/isa/dequant.h.
__device__ float k_quant(const uint8_t* b, const uint8_t* quants, const uint8_t* fifth, uint32_t i) {
  const uint32_t group = i / 32, j = i % 32;
  const uint8_t* s = b + 4;
  uint32_t scale, min;
  if (group < 4) {
    scale = s[group] & 63;
    min = s[4 + group] & 63;
  } else {
    scale = (s[4 + group] & 15) | s[group - 4] >> 6 << 4;
    min = s[4 + group] >> 4 | s[group] >> 6 << 4;
  }
  const uint8_t byte = quants[group / 2 * 32 + j];
  const int q = (group % 2 ? byte >> 4 : byte & 15) + (fifth ? (fifth[j] >> group & 1) << 4 : 0);
  return half_at(b) * static_cast<float>(scale) * static_cast<float>(q) -
         half_at(b + 2) * static_cast<float>(min);
}

// Element i (of 256) of q6_K: 128 bytes of low halves, 64 bytes of pairs of high bits, 16 signed scales, d.
__device__ float q6_k(const uint8_t* b, uint32_t i) {
  const uint32_t half = i / 128, quarter = i % 128 / 32, j = i % 32;
  const uint8_t low = b[64 * half + quarter % 2 * 32 + j], high = b[128 + 32 * half + j];
  const int q = (quarter < 2 ? low & 15 : low >> 4) + ((high >> 2 * quarter & 3) << 4) - 32;
  const int scale = static_cast<int8_t>(b[192 + 8 * half + 2 * quarter + j / 16]);
  return half_at(b + 208) * static_cast<float>(scale) * static_cast<float>(q);
}

// Element i of a row. Products are exact in f32 (11 bits of d, at most 7 of a scale and 6 of a quant), so at
// most one addition rounds and the value is the CPU's.
__device__ float dequantize_element(DType type, const uint8_t* row, uint32_t i) {
  const auto block = [&](uint32_t elements, uint32_t bytes) { return row + uint64_t(i / elements) * bytes; };
  const uint32_t j = i % 32;
  switch (type) {
    case DType::kF32:
      return reinterpret_cast<const float*>(row)[i];
    case DType::kF16:
      return half_at(row + uint64_t(2) * i);
    case DType::kBF16:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
    case DType::kQ8_0: {
      const uint8_t* b = block(32, 34);
      return half_at(b) * static_cast<float>(static_cast<int8_t>(b[2 + j]));
    }
    case DType::kQ4_0: {
      const uint8_t* b = block(32, 18);
      return half_at(b) * static_cast<float>(nibble(b + 2, j) - 8);
    }
    case DType::kQ4_1: {
      const uint8_t* b = block(32, 20);
      return half_at(b) * static_cast<float>(nibble(b + 4, j)) + half_at(b + 2);
    }
    case DType::kQ5_0: {
      const uint8_t* b = block(32, 22);
      return half_at(b) * static_cast<float>(nibble(b + 6, j) + fifth_bit(b + 2, j) - 16);
    }
    case DType::kQ5_1: {
      const uint8_t* b = block(32, 24);
      return half_at(b) * static_cast<float>(nibble(b + 8, j) + fifth_bit(b + 4, j)) + half_at(b + 2);
    }
    case DType::kQ4_K: {
      const uint8_t* b = block(256, 144);
      return k_quant(b, b + 16, nullptr, i % 256);
    }
    case DType::kQ5_K: {
      const uint8_t* b = block(256, 176);
      return k_quant(b, b + 48, b + 16, i % 256);
    }
    case DType::kQ6_K:
      return q6_k(block(256, 210), i % 256);
  }
  return 0;
}

__global__ void embed_kernel(const StepParams* step, uint32_t cols, const int32_t* tokens, DType type,
                             const uint8_t* table, uint64_t row_bytes, float* x) {
  begin_kernel();
  const uint32_t row = blockIdx.x;
  if (row >= step->n_rows) return;
  const uint8_t* from = table + static_cast<uint64_t>(tokens[row]) * row_bytes;
#pragma unroll 4
  for (uint32_t c = blockIdx.y * kThreads + threadIdx.x; c < cols; c += gridDim.y * kThreads)
    x[uint64_t(row) * cols + c] = dequantize_element(type, from, c);
}

}  // namespace

void embed(const Launch& l, const Embed& op) {
  // One row is spread over the card, as its bytes come from far away.
  const uint32_t parts = l.max_rows == 1 ? static_cast<uint32_t>(ceil_div(op.p.cols, kThreads)) : 1;
  launch(l, embed_kernel, dim3(l.max_rows, parts), kThreads, 0, l.step, op.p.cols, data<int32_t>(op.tokens),
         op.table.type, data<uint8_t>(op.table), dtype_bytes(op.table.type, op.p.cols), data<float>(op.x));
}

}  // namespace thimble::cuda
