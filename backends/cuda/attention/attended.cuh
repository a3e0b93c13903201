// How many entries attention of a single row to the pool has to process. Device side.
#pragma once

#include "backends/cuda/head_blocks.cuh"

namespace thimble::cuda {

// The number of entries that a head of this op attends to. `heads`: the op's rows of the head table, from
// first_head on. If the list is made later in the program, this is its largest possible length.
struct Attended {
  const HeadState* heads;
  uint32_t n_rows, most;
  __device__ Attended(const StepParams& s, const HeadState* table, const AttentionParams& p, bool has_list)
      : heads(table + p.first_head), n_rows(s.n_rows), most(has_list ? p.list_capacity - 1 : ~0u) {
    if (p.window) most = min(most, p.window);
  }
  __device__ uint32_t operator()(uint32_t head) const { return min(heads[head].n_entries + n_rows, most); }
};

}  // namespace thimble::cuda
