// kv_compact: keeps the listed entries of pool and chunk, in place.
#include "backends/cuda/kv/kv_compact.h"
#include "backends/cuda/kv/slices.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

// Columns of the pool are independent. A block moves a slice, so 8 KV heads of 128 channels occupy 128
// multiprocessors. Two blocks fit on one, which leaves space for the small columns.
constexpr uint32_t kThreads = 512;
constexpr uint32_t kLoads = 4;  // rows per thread in flight at once

// The first list index whose entry is not in its place, found by searching kThreads + 1 parts at a time; all
// threads call this.
__device__ uint32_t first_moved(const EntryList& list, uint32_t n_entries) {
  uint32_t begin = 0, end = min(list.count, n_entries);  // the result is in [begin, end]
  if (!list.entries) return end;
  while (begin < end) {
    const uint32_t step = (end - begin + kThreads - 1) / kThreads, i = begin + threadIdx.x * step;
    const uint32_t in_place =
        __syncthreads_count(i < end && list.entries[i] == i);  // list[i] - i never falls
    if (in_place == 0) return begin;
    end = min(end, begin + in_place * step);
    begin += (in_place - 1) * step + 1;
  }
  return begin;
}

// Moves kWidth units of every listed row of one column. Rows have `stride` units; this block moves those from
// `first` on.
//
// Entries ascend, so row i comes from row i or a later one. The sources of a tile are in none of the tiles
// before it, so a tile may be written as soon as it and those before it were read. The next tile is therefore
// loaded while one is written.
template <uint32_t kWidth, typename Unit>
__device__ void move_column(const EntryList& list, uint32_t n_entries, Unit* pool, const Unit* chunk,
                            uint32_t stride, uint32_t first) {
  constexpr uint32_t kRows = kThreads / kWidth, kTile = kLoads * kRows;
  const uint32_t column = first + threadIdx.x % kWidth, row = threadIdx.x / kWidth;
  const bool has_column = column < stride;
  uint32_t entries[kLoads];
  Unit loaded[kLoads] = {}, next[kLoads] = {};
  const auto find = [&](uint32_t tile) {
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) {
      const uint32_t i = tile + row + j * kRows;
      if (i < list.count) entries[j] = list[i];
    }
  };
  const auto load = [&](uint32_t tile, Unit* to) {
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) {
      if (tile + row + j * kRows >= list.count || !has_column) continue;
      const uint32_t e = entries[j];
      to[j] = __ldcg(
          (e < n_entries ? pool + uint64_t(e) * stride : chunk + uint64_t(e - n_entries) * stride) + column);
    }
  };
  uint32_t tile = first_moved(list, n_entries);
  find(tile);
  load(tile, loaded);
  find(tile + kTile);
  for (; tile < list.count; tile += kTile) {
    __syncthreads();  // this tile has been read
    load(tile + kTile, next);
    find(tile + 2 * kTile);
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) {
      const uint32_t i = tile + row + j * kRows;
      if (i < list.count && has_column) pool[uint64_t(i) * stride + column] = loaded[j];
      loaded[j] = next[j];
    }
  }
}

struct Columns {
  void *k, *v;  // v: null if values are channels of the keys
  const void *chunk_k, *chunk_v;
  uint32_t *pos, *cis;
  const uint32_t *chunk_pos, *chunk_cis;
};

// Vector: the largest type of which all rows consist. A block moves a slice of k or v of a head; the last two
// blocks of a head move its positions and scores. `heads`: from KV head 0 of the layer on.
template <typename Vector>
__global__ void __launch_bounds__(kThreads, 2)
    kv_compact_kernel(const StepParams* step, const HeadState* heads, KvCompactParams p,
                      const uint32_t* lists, Columns c, SlicedRows rows) {
  const StepParams s = begin_kernel(step);
  const uint32_t head = p.first_head + blockIdx.y;
  const HeadState state = heads[head];
  const uint32_t n_entries = c.chunk_k ? state.n_entries : ~0u;  // entries in the pool
  const EntryList list = entry_list(lists, head, p.list_capacity, step_entries(s, state));
  const uint64_t in_pool = state.first, in_chunk = uint64_t(head) * p.chunk_capacity;
  const uint32_t slices = rows.k_slices + rows.v_slices;
  if (blockIdx.x < slices) {
    constexpr uint32_t kWidth = kSliceBytes / sizeof(Vector);
    const bool is_v = blockIdx.x >= rows.k_slices;
    const uint32_t stride = (is_v ? rows.v_bytes : rows.k_bytes) / sizeof(Vector);
    Vector* pool = static_cast<Vector*>(is_v ? c.v : c.k);
    const Vector* chunk = static_cast<const Vector*>(is_v ? c.chunk_v : c.chunk_k);
    move_column<kWidth>(list, n_entries, pool + in_pool * stride, chunk + in_chunk * stride, stride,
                        (is_v ? blockIdx.x - rows.k_slices : blockIdx.x) * kWidth);
  } else {
    const bool is_cis = blockIdx.x > slices;
    uint32_t* pool = is_cis ? c.cis : c.pos;
    if (pool)
      move_column<1>(list, n_entries, pool + in_pool, (is_cis ? c.chunk_cis : c.chunk_pos) + in_chunk, 1, 0);
  }
}

}  // namespace

void compact(const Launch& l, const KvCompact& op, const uint32_t* lists) {
  const Columns c{data<void>(op.k.values),       data<void>(op.v.values),     data<void>(op.chunk_k.values),
                  data<void>(op.chunk_v.values), data<uint32_t>(op.pos),      data<uint32_t>(op.cis),
                  data<uint32_t>(op.chunk_pos),  data<uint32_t>(op.chunk_cis)};
  const SlicedRows rows(op.k, op.v, op.p.head_dim);
  const dim3 blocks(rows.k_slices + rows.v_slices + 2, op.p.heads);
  with_unit(rows, {c.k, c.v, c.chunk_k, c.chunk_v}, [&]<typename Vector>(Vector) {
    launch(l, kv_compact_kernel<Vector>, blocks, kThreads, 0, l.step, l.heads + op.p.head_state, op.p, lists,
           c, rows);
  });
  l.rewritten->push_back(op.k.values);
}

void kv_compact(const Launch& l, const KvCompact& op) { compact(l, op, data<uint32_t>(op.list)); }

}  // namespace thimble::cuda
