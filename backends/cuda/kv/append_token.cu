// What a token's row of q, k and v goes through at once: kv_append, and the copy into the ring and the query
// gate where they follow. Each on its own takes 2.5 us of an H200, in every layer.
#include "backends/cuda/dense/copy.cuh"
#include "backends/cuda/kv/kv_append.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/select/query_gate.cuh"
#include "backends/cuda/side_by_side.cuh"

namespace thimble::cuda {

void append_token(const Launch& l, const KvAppend& append, const Copy* copy, const QueryGate* gate) {
  constexpr uint32_t kThreads = QueryGateTask<float4>::kThreads;
  const bool quads = gate && in_quads(*gate);
  launch_side_by_side(l, kThreads, quads ? QueryGateTask<float4>(l, *gate) : QueryGateTask<float4>(),
                      KvAppendTask(l, append, kThreads), copy ? CopyTask(l, *copy, kThreads) : CopyTask());
  if (gate && !quads) query_gate(l, *gate);
}

}  // namespace thimble::cuda
