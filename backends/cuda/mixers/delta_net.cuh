// What the kernels of delta_net share. Device side, but for delta_steps() and delta_chunks().
#pragma once

#include "backends/cuda/gate.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {

// Rows of a chunk. Chunks begin at row 0 of a step. A last chunk of fewer than kLeastChunk rows goes row by
// row.
inline constexpr uint32_t kDeltaChunk = 64, kLeastChunk = 16;

struct DeltaOperands {
  const float *qkv, *gates, *a, *dt;
  float* slots;
  uint64_t slot_stride;  // in floats
  float* y;
};

// The convolution of a single row that makes the vectors of delta_net.
struct Convolution {
  const float *x, *w;
  float* tails;
  uint64_t tail_stride;  // in floats
  float* y;
  uint32_t taps, channels;
};

// The gated_norm of a single row that reads what delta_net writes. z null: none.
struct Norm {
  const float *z, *weight;
  float eps;
  bool sigmoid;  // or silu
};

// Row by row; with `chunks`, only the rows that these leave. `convolution`: null, or what makes the vectors;
// with it may be a norm.
void delta_steps(const Launch&, const DeltaNetParams&, const DeltaOperands&, bool chunks,
                 const Convolution* convolution, const Norm& norm);
// Whole chunks, and a last one of at least kLeastChunk rows. The scratch has room for a chunk.
void delta_chunks(const Launch&, const DeltaNetParams&, const DeltaOperands&);
// Bytes of scratch that a chunk takes.
uint64_t delta_chunk_bytes(uint32_t key_heads, uint32_t value_heads, uint32_t width);

// The chunks of a step.
__device__ inline uint32_t chunks_of(uint32_t rows) {
  return rows / kDeltaChunk + (rows % kDeltaChunk >= kLeastChunk ? 1 : 0);
}
// Whether a head goes row by row: what grows from row to row exceeds f16.
__device__ inline bool grows(float a) { return a > 0; }
__device__ inline uint32_t key_head_of(const DeltaNetParams& p, uint32_t head) {
  return p.tiled ? head % p.key_heads : head / (p.value_heads / p.key_heads);
}
// Whether this is the first value head of its key head.
__device__ inline bool leads(const DeltaNetParams& p, uint32_t head) {
  return p.tiled ? head < p.key_heads : head % (p.value_heads / p.key_heads) == 0;
}
// The matrices that a kernel begins with: those of the step, or those that the kernel before it wrote. Null:
// zeros.
__device__ inline const float* state_before(const StepParams& s, const DeltaOperands& o, bool goes_on) {
  const uint32_t slot = goes_on ? s.state_to : s.state_from;
  return slot == kNoState ? nullptr : o.slots + slot * o.slot_stride;
}
// gamma
__device__ inline float log_decay(float a, float alpha, float dt) {
  const float x = alpha + dt;
  return a * (x > 20 ? x : log1pf(expf(x)));
}

}  // namespace thimble::cuda
