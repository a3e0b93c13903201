#include "backends/cuda/ops.h"
#include "backends/cuda/select/query_gate.cuh"
#include "backends/cuda/side_by_side.cuh"

namespace thimble::cuda {

void query_gate(const Launch& l, const QueryGate& op) {
  if (in_quads(op))
    launch_side_by_side(l, QueryGateTask<float4>::kThreads, QueryGateTask<float4>(l, op));
  else
    launch_side_by_side(l, QueryGateTask<float>::kThreads, QueryGateTask<float>(l, op));
}

}  // namespace thimble::cuda
