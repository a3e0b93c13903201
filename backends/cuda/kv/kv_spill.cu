// kv_spill: copies the entries that a compaction is going to drop, to host memory.
#include <algorithm>

#include "backends/cuda/copy_row.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp;
constexpr uint32_t kAtOnce = 8;  // entries that a warp finds at once, and then copies one after the other

// Keys or values.
struct SpilledRows {
  const void *pool, *chunk;  // chunk: null without one
  void* to;
  float* numbers;  // where the numbers go once more; null for values
};
// Everything else, which is copied with the values. All are null for keys.
struct SpilledColumns {
  const uint32_t *pool_pos, *pool_cis, *chunk_pos, *chunk_cis;
  uint32_t *pos, *cis, *count;
};

// The entries that a head's list lacks.
struct Unlisted {
  EntryList list;
  uint32_t count, in_pool;  // entries from `in_pool` on are rows of the chunk
  uint64_t pool, chunk;     // where the head begins in the arrays

  struct Place {
    bool chunked;
    uint64_t at;
  };
  __device__ Place place_of(uint32_t entry) const {
    const bool chunked = entry >= in_pool;
    return {chunked, chunked ? chunk + entry - in_pool : pool + entry};
  }
  // Unlisted entry i comes after i others and `low` listed ones.
  __device__ uint32_t find(uint32_t i) const {
    uint32_t low = 0, high = list.count;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (list[middle] - middle > i)
        high = middle;
      else
        low = middle + 1;
    }
    return i + low;
  }
};

__device__ void copy_columns(const SpilledColumns& c, const Unlisted::Place& from, uint64_t to) {
  c.pos[to] = (from.chunked ? c.chunk_pos : c.pool_pos)[from.at];
  c.cis[to] = (from.chunked ? c.chunk_cis : c.pool_cis)[from.at];
}

// The warp copies row number `to`.
template <typename From, typename To>
__device__ void copy_row(const SpilledRows& rows, const Unlisted::Place& from, uint64_t to, uint32_t head_dim,
                         RowBuffer& buffer) {
  const auto* const row = static_cast<const typename From::Unit*>(from.chunked ? rows.chunk : rows.pool) +
                          from.at * From::row_units(head_dim);
  for (uint32_t c = threadIdx.x % kWarp; c < head_dim && rows.numbers; c += kWarp)
    rows.numbers[to * head_dim + c] = From::load(row, head_dim, c);
  copy_row_to_host<From, To>(row, static_cast<typename To::Unit*>(rows.to) + to * To::row_units(head_dim),
                             head_dim, buffer);
}

// `heads`: from KV head 0 of the layer on.
template <typename From, typename To>
__global__ void __launch_bounds__(kThreads)
    kv_spill_kernel(const StepParams* step, const HeadState* heads, KvSpillParams p, const uint32_t* lists,
                    SpilledRows rows, SpilledColumns columns) {
  __shared__ RowBuffer buffers[kWarps];
  const StepParams s = begin_kernel(step);
  const uint32_t head = p.first_head + blockIdx.y, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const HeadState state = heads[head];
  const uint32_t entries = step_entries(s, state);
  const EntryList list = entry_list(lists, head, p.list_capacity, entries);
  const Unlisted unlisted{list, entries - list.count, rows.chunk ? state.n_entries : entries, state.first,
                          uint64_t(head) * p.chunk_capacity};
  const uint64_t to = uint64_t(head) * p.spill_capacity;
  for (uint32_t first = (blockIdx.x * kWarps + warp) * kAtOnce; first < unlisted.count;
       first += gridDim.x * kWarps * kAtOnce) {
    const uint32_t count = min(kAtOnce, unlisted.count - first);
    const uint32_t entry = unlisted.find(first + min(lane, count - 1));
    if (columns.count && lane < count) copy_columns(columns, unlisted.place_of(entry), to + first + lane);
    for (uint32_t i = 0; i < count; ++i)
      copy_row<From, To>(rows, unlisted.place_of(__shfl_sync(~0u, entry, i)), to + first + i, p.head_dim,
                         buffers[warp]);
  }
  if (!columns.count || blockIdx.x > 0 || threadIdx.x > 0) return;
  columns.count[1 + head] = unlisted.count;
  if (blockIdx.y == 0) columns.count[0] = 1 + p.head_state;
}

void spill(const Launch& l, const KvSpill& op, const KvArray& pool, const KvArray& chunk, const KvArray& to,
           float* numbers, const SpilledColumns& columns) {
  const uint64_t most = ceil_div(op.p.spill_capacity, kWarps * kAtOnce),
                 enough = ceil_div(2 * l.card.multiprocessors, op.p.heads);
  const dim3 blocks(static_cast<uint32_t>(std::min(most, enough)), op.p.heads);
  const SpilledRows rows{data<void>(pool.values), data<void>(chunk.values), data<void>(to.values), numbers};
  const auto copy = [&]<typename From, typename To>(From, To) {
    launch(l, kv_spill_kernel<From, To>, blocks, kThreads, 0, l.step, l.heads + op.p.head_state, op.p,
           data<uint32_t>(op.list), rows, columns);
  };
  if (pool.type == to.type)
    with_format(pool.type, [&](const auto& format) { copy(format, format); });
  else
    with_format(to.type, [&](const auto& format) { copy(HalfRows{}, format); });
}

}  // namespace

void kv_spill(const Launch& l, const KvSpill& op) {
  spill(l, op, op.pool_k, op.chunk_k, op.k, data<float>(op.keys), {});
  spill(l, op, op.pool_v, op.chunk_v, op.v, nullptr,
        {data<uint32_t>(op.pool_pos), data<uint32_t>(op.pool_cis), data<uint32_t>(op.chunk_pos),
         data<uint32_t>(op.chunk_cis), data<uint32_t>(op.pos), data<uint32_t>(op.cis),
         data<uint32_t>(op.count)});
}

}  // namespace thimble::cuda
