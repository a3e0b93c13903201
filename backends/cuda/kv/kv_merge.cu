// kv_merge: sorts a run by position after entries were appended out of order.
#include "backends/cuda/kv/gaps.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/positions.cuh"

namespace thimble::cuda {
namespace {

// All threads call this. Positions nearly always ascend, so the tail is usually empty.
__device__ Gaps find_tail(const StepParams& s, const HeadState& state, const int32_t* pos) {
  __shared__ uint32_t begin, before[kMostMergedRows];
  const uint32_t n = min(state.keep, step_entries(s, state)), rows = min(s.n_rows, n);
  const uint32_t i = n - rows + threadIdx.x;
  const bool descends = i > 0 && i < n && pos[i] < pos[i - 1];
  if (!__syncthreads_or(descends)) return {n, 0, before};
  if (descends) begin = i;
  __syncthreads();
  const Gaps tail{begin, n - begin, before};
  if (threadIdx.x < tail.count) before[threadIdx.x] = lower_bound(pos, tail.end, pos[tail.end + threadIdx.x]);
  __syncthreads();
  return tail;
}

// Moves kWidth units of every row of one column. Rows have `stride` units; this block moves those from
// `first` on.
template <uint32_t kWidth, typename Unit>
__device__ void merge_column(const Gaps& tail, Unit* run, uint32_t stride, uint32_t first) {
  __shared__ Unit moved[kMostMergedRows * kWidth];
  constexpr uint32_t kRows = kGapThreads / kWidth;
  const uint32_t column = first + threadIdx.x % kWidth, row = threadIdx.x / kWidth;
  const bool has_column = column < stride;
  const auto at = [&](uint32_t i) -> Unit& { return run[uint64_t(i) * stride + column]; };
  for (uint32_t j = row; j < tail.count && has_column; j += kRows)
    moved[j * kWidth + threadIdx.x % kWidth] = at(tail.end + j);
  open_gaps<kWidth>(tail, run, stride, first);
  for (uint32_t j = row; j < tail.count && has_column; j += kRows)
    at(tail.before[j] + j) = moved[j * kWidth + threadIdx.x % kWidth];
}

// Vector: the largest type of which all rows consist. A block moves a slice of k or v of a head; the last
// block of a head moves its scores. `heads`: from KV head 0 of the layer on.
template <typename Vector>
__global__ void __launch_bounds__(kGapThreads)
    kv_merge_kernel(const StepParams* step, const HeadState* heads, KvMergeParams p, Vector* k, Vector* v,
                    uint32_t* cis, const int32_t* pos, SlicedRows rows) {
  const StepParams s = begin_kernel(step);
  const HeadState state = heads[p.first_head + blockIdx.y];
  const Gaps tail = find_tail(s, state, pos + state.first);
  if (tail.count == 0) return;
  if (blockIdx.x < rows.k_slices + rows.v_slices) {
    constexpr uint32_t kWidth = kSliceBytes / sizeof(Vector);
    const bool is_v = blockIdx.x >= rows.k_slices;
    const uint32_t stride = (is_v ? rows.v_bytes : rows.k_bytes) / sizeof(Vector);
    merge_column<kWidth>(tail, (is_v ? v : k) + uint64_t(state.first) * stride, stride,
                         (is_v ? blockIdx.x - rows.k_slices : blockIdx.x) * kWidth);
  } else {
    merge_column<1>(tail, cis + state.first, 1, 0);
  }
}

// Positions move last, because the other kernels read them.
__global__ void __launch_bounds__(kGapThreads)
    merge_positions_kernel(const StepParams* step, const HeadState* heads, KvMergeParams p, int32_t* pos) {
  const StepParams s = begin_kernel(step);
  const HeadState state = heads[p.first_head + blockIdx.x];
  const Gaps tail = find_tail(s, state, pos + state.first);
  if (tail.count) merge_column<1>(tail, pos + state.first, 1, 0);
}

}  // namespace

void kv_merge(const Launch& l, const KvMerge& op) {
  const SlicedRows rows(op.k, op.v, op.p.head_dim);
  with_unit(rows, {data<void>(op.k.values), data<void>(op.v.values)}, [&]<typename Vector>(Vector) {
    launch(l, kv_merge_kernel<Vector>, dim3(rows.k_slices + rows.v_slices + 1, op.p.heads), kGapThreads, 0,
           l.step, l.heads + op.p.head_state, op.p, data<Vector>(op.k.values), data<Vector>(op.v.values),
           data<uint32_t>(op.cis), data<int32_t>(op.pos), rows);
  });
  launch(l, merge_positions_kernel, op.p.heads, kGapThreads, 0, l.step, l.heads + op.p.head_state, op.p,
         data<int32_t>(op.pos));
  l.rewritten->push_back(op.k.values);
}

}  // namespace thimble::cuda
