#include "backends/cuda/kv/kv_append.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/side_by_side.cuh"

namespace thimble::cuda {

void kv_append(const Launch& l, const KvAppend& op) {
  if (l.max_rows == 1 && !op.positions) return append_token(l, op, nullptr, nullptr);
  constexpr uint32_t kThreads = 256;
  with_formats(op.k.type, op.v.type, [&]<typename Keys, typename Values>(Keys, Values) {
    if (op.positions)
      launch_side_by_side(l, kThreads, KvAppendPositionsTask<Keys, Values>(l, op, kThreads));
    else
      launch_side_by_side(l, kThreads, KvAppendTask<Keys, Values>(l, op, kThreads));
  });
}

}  // namespace thimble::cuda
