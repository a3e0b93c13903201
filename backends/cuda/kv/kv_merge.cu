// kv_merge: sorts a run by position after entries were appended out of order.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

// As in kv_compact, a block moves 32 bytes of every row.
constexpr uint32_t kThreads = 256;
constexpr uint32_t kSliceBytes = 32;
constexpr uint32_t kLoads = 4;  // rows per thread in flight at once

// The entries of a run from `begin` on, which belong among the earlier ones: entry begin + j goes after
// before[j] of them.
struct Tail {
  uint32_t begin, count;
  const uint32_t* before;  // in shared memory, ascending

  // The new index of entry i, which is before the tail: it goes after those of the tail that precede it.
  __device__ uint32_t place_of(uint32_t i) const {
    uint32_t low = 0, high = count;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (before[middle] <= i)
        low = middle + 1;
      else
        high = middle;
    }
    return i + low;
  }
};

// Index of the first of n ascending positions that is not less than `position`.
__device__ uint32_t lower_bound(const int32_t* pos, uint32_t n, int32_t position) {
  uint32_t low = 0;
  while (low < n) {
    const uint32_t middle = (low + n) / 2;
    if (pos[middle] < position)
      low = middle + 1;
    else
      n = middle;
  }
  return low;
}

// All threads call this. Positions nearly always ascend, so the tail is usually empty.
__device__ Tail find_tail(const StepParams& s, const HeadState& state, const int32_t* pos) {
  __shared__ uint32_t begin, before[kMostMergedRows];
  const uint32_t n = min(state.keep, step_entries(s, state)), rows = min(s.n_rows, n);
  const uint32_t i = n - rows + threadIdx.x;
  const bool descends = i > 0 && i < n && pos[i] < pos[i - 1];
  if (!__syncthreads_or(descends)) return {n, 0, before};
  if (descends) begin = i;
  __syncthreads();
  const Tail tail{begin, n - begin, before};
  if (threadIdx.x < tail.count)
    before[threadIdx.x] = lower_bound(pos, tail.begin, pos[tail.begin + threadIdx.x]);
  __syncthreads();
  return tail;
}

// Moves kWidth units of every row of one column. Rows have `stride` units; this block moves those from
// `first` on.
//
// Entries before the tail move up, the last ones first, tile by tile. None moves to below its tile, so a tile
// may be written once it was read.
template <uint32_t kWidth, typename Unit>
__device__ void merge_column(const Tail& tail, Unit* run, uint32_t stride, uint32_t first) {
  __shared__ Unit moved[kMostMergedRows * kWidth];
  constexpr uint32_t kRows = kThreads / kWidth, kTile = kLoads * kRows;
  const uint32_t column = first + threadIdx.x % kWidth, row = threadIdx.x / kWidth;
  const bool has_column = column < stride;
  const auto at = [&](uint32_t i) -> Unit& { return run[uint64_t(i) * stride + column]; };
  for (uint32_t j = row; j < tail.count && has_column; j += kRows)
    moved[j * kWidth + threadIdx.x % kWidth] = at(tail.begin + j);
  const uint32_t in_place = tail.before[0];
  for (uint32_t end = tail.begin, begin; end > in_place; end = begin) {
    begin = end - min(end - in_place, kTile);
    Unit loaded[kLoads] = {};
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j)
      if (const uint32_t i = begin + row + j * kRows; i < end && has_column) loaded[j] = at(i);
    __syncthreads();  // the tail and this tile have been read
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j)
      if (const uint32_t i = begin + row + j * kRows; i < end && has_column) at(tail.place_of(i)) = loaded[j];
  }
  for (uint32_t j = row; j < tail.count && has_column; j += kRows)
    at(tail.before[j] + j) = moved[j * kWidth + threadIdx.x % kWidth];
}

// The rows of keys and of values in bytes, and in slices.
struct Rows {
  uint32_t k_bytes, v_bytes, k_slices, v_slices;
};

// Vector: the largest type of which all rows consist. A block moves a slice of k or v of a head; the last
// block of a head moves its scores. `heads`: from KV head 0 of the layer on.
template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    kv_merge_kernel(const StepParams* step, const HeadState* heads, KvMergeParams p, Vector* k, Vector* v,
                    uint32_t* cis, const int32_t* pos, Rows rows) {
  const StepParams s = begin_kernel(step);
  const HeadState state = heads[p.first_head + blockIdx.y];
  const Tail tail = find_tail(s, state, pos + state.first);
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
__global__ void __launch_bounds__(kThreads)
    merge_positions_kernel(const StepParams* step, const HeadState* heads, KvMergeParams p, int32_t* pos) {
  const StepParams s = begin_kernel(step);
  const HeadState state = heads[p.first_head + blockIdx.x];
  const Tail tail = find_tail(s, state, pos + state.first);
  if (tail.count) merge_column<1>(tail, pos + state.first, 1, 0);
}

template <typename Vector>
void merge(const Launch& l, const KvMerge& op, const Rows& rows) {
  launch(l, kv_merge_kernel<Vector>, dim3(rows.k_slices + rows.v_slices + 1, op.p.heads), kThreads, 0, l.step,
         l.heads + op.p.head_state, op.p, data<Vector>(op.k.values), data<Vector>(op.v.values),
         data<uint32_t>(op.cis), data<int32_t>(op.pos), rows);
}

}  // namespace

void kv_merge(const Launch& l, const KvMerge& op) {
  const uint32_t k_bytes = static_cast<uint32_t>(kv_bytes(op.k.type, op.p.head_dim)),
                 v_bytes = op.v ? static_cast<uint32_t>(kv_bytes(op.v.type, op.p.head_dim)) : 0;
  const Rows rows{k_bytes, v_bytes, static_cast<uint32_t>(ceil_div(k_bytes, kSliceBytes)),
                  static_cast<uint32_t>(ceil_div(v_bytes, kSliceBytes))};
  const uint64_t alignment = k_bytes | v_bytes | reinterpret_cast<uint64_t>(data<void>(op.k.values)) |
                             reinterpret_cast<uint64_t>(data<void>(op.v.values));
  if (alignment % sizeof(uint4) == 0)
    merge<uint4>(l, op, rows);
  else if (alignment % sizeof(uint2) == 0)
    merge<uint2>(l, op, rows);
  else if (alignment % sizeof(uint32_t) == 0)
    merge<uint32_t>(l, op, rows);
  else
    merge<uint16_t>(l, op, rows);
  launch(l, merge_positions_kernel, op.p.heads, kThreads, 0, l.step, l.heads + op.p.head_state, op.p,
         data<int32_t>(op.pos));
  l.rewritten->push_back(op.k.values);
}

}  // namespace thimble::cuda
