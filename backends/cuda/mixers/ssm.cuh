// What the two forms of ssm share.
#pragma once

#include "backends/cuda/gate.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {

// Programs of fewer rows go row by row.
inline constexpr uint32_t kLeastChunkRows = 16;

struct SsmOperands {
  const float *xbc, *dt, *dt_bias, *a, *d;
  float* slots;
  uint64_t slot_stride;  // in floats
  float* y;
};

// In chunks. The scratch has room for a chunk.
void ssm_chunks(const Launch&, const SsmParams&, const SsmOperands&);
// Bytes of scratch that a chunk takes. `values`: channels of all heads.
uint64_t ssm_chunk_bytes(uint32_t heads, uint32_t groups, uint32_t values, uint32_t state);

}  // namespace thimble::cuda
