// kv_recall: puts rows back into runs, and takes out the entries that are not listed. Rows and lists are in
// host memory.
#include <algorithm>

#include "backends/cuda/copy_row.cuh"
#include "backends/cuda/kv/gaps.cuh"
#include "backends/cuda/kv/kv_compact.h"
#include "backends/cuda/positions.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp;

// In scratch: the lists, and how many listed entries come before each row, at the row's index in its run.
struct Scratch {
  uint32_t *lists, *before;

  Scratch(const Launch& l, const KvRecallParams& p)
      : lists(reinterpret_cast<uint32_t*>(l.scratch)),
        before(lists + uint64_t(p.first_head + p.heads) * p.list_capacity) {}
  static uint64_t bytes(const ModelShape& m, const SessionShape& s) {
    return (m.kv_heads * (1 + uint64_t(s.reach)) + s.layer_entries) * sizeof(uint32_t);
  }
};

// The rows of all heads.
struct RecalledRows {
  const uint32_t* count;
  const int32_t* pos;
};

// Every later kernel reads the lists several times.
__global__ void __launch_bounds__(kThreads)
    copy_lists_kernel(KvRecallParams p, const uint32_t* lists, Scratch scratch) {
  begin_kernel();
  const uint64_t first = uint64_t(p.first_head + blockIdx.y) * p.list_capacity;
  const uint32_t count = lists[first];
#pragma unroll 4
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i <= count; i += gridDim.x * kThreads)
    scratch.lists[first + i] = lists[first + i];
}

// The run has been compacted to the list.
__global__ void __launch_bounds__(kThreads)
    find_places_kernel(const HeadState* heads, KvRecallParams p, const int32_t* pos, RecalledRows rows,
                       Scratch scratch) {
  begin_kernel();
  const uint32_t head = p.first_head + blockIdx.y, count = rows.count[head],
                 listed = scratch.lists[uint64_t(head) * p.list_capacity];
  const uint64_t run = heads[head].first;
  for (uint32_t row = blockIdx.x * kThreads + threadIdx.x; row < count; row += gridDim.x * kThreads)
    scratch.before[run + row] =
        lower_bound(pos + run, listed, rows.pos[uint64_t(head) * p.row_capacity + row]);
}

// Vector: the largest type of which all rows consist. A block moves a slice of k or v of a head; the last two
// blocks of a head move its positions and scores.
template <typename Vector>
__global__ void __launch_bounds__(kGapThreads)
    open_gaps_kernel(const HeadState* heads, KvRecallParams p, Vector* k, Vector* v, uint32_t* pos,
                     uint32_t* cis, SlicedRows sliced, RecalledRows rows, Scratch scratch) {
  begin_kernel();
  const uint32_t head = p.first_head + blockIdx.y, slices = sliced.k_slices + sliced.v_slices;
  const uint64_t run = heads[head].first;
  const Gaps gaps{scratch.lists[uint64_t(head) * p.list_capacity], rows.count[head], scratch.before + run};
  if (gaps.count == 0) return;
  if (blockIdx.x < slices) {
    constexpr uint32_t kWidth = kSliceBytes / sizeof(Vector);
    const bool is_v = blockIdx.x >= sliced.k_slices;
    const uint32_t stride = (is_v ? sliced.v_bytes : sliced.k_bytes) / sizeof(Vector);
    open_gaps<kWidth>(gaps, (is_v ? v : k) + run * stride, stride,
                      (is_v ? blockIdx.x - sliced.k_slices : blockIdx.x) * kWidth);
  } else {
    open_gaps<1>(gaps, (blockIdx.x == slices ? pos : cis) + run, 1, 0);
  }
}

// A warp puts rows of keys or of values into their gaps, and with the values everything else.
template <typename From, typename To>
__global__ void __launch_bounds__(kThreads)
    put_rows_kernel(const HeadState* heads, KvRecallParams p, const typename From::Unit* from,
                    typename To::Unit* to, int32_t* pos, float* cis, RecalledRows rows, Scratch scratch) {
  __shared__ RowBuffer buffers[kWarps];
  begin_kernel();
  const uint32_t head = p.first_head + blockIdx.y, count = rows.count[head], warp = threadIdx.x / kWarp;
  const uint64_t run = heads[head].first, first = uint64_t(head) * p.row_capacity;
  for (uint32_t row = blockIdx.x * kWarps + warp; row < count; row += gridDim.x * kWarps) {
    const uint64_t place = run + scratch.before[run + row] + row;
    copy_row_to_device<From, To>(from + (first + row) * From::row_units(p.head_dim),
                                 to + place * To::row_units(p.head_dim), p.head_dim, buffers[warp]);
    if (!pos || threadIdx.x % kWarp) continue;
    pos[place] = rows.pos[first + row];
    cis[place] = -kInfinity;
  }
}

void put_rows(const Launch& l, const KvRecall& op, const KvArray& from, const KvArray& to, int32_t* pos,
              float* cis, const RecalledRows& rows, const Scratch& scratch) {
  const uint64_t most = ceil_div(op.p.row_capacity, kWarps),
                 enough = ceil_div(2 * l.card.multiprocessors, op.p.heads);
  const dim3 blocks(static_cast<uint32_t>(std::min(most, enough)), op.p.heads);
  const auto put = [&]<typename From, typename To>(From, To) {
    launch(l, put_rows_kernel<From, To>, blocks, kThreads, 0, l.heads + op.p.head_state, op.p,
           data<typename From::Unit>(from.values), data<typename To::Unit>(to.values), pos, cis, rows,
           scratch);
  };
  if (from.type == to.type)
    with_format(from.type, [&](const auto& format) { put(format, format); });
  else
    with_format(from.type, [&](const auto& format) { put(format, HalfRows{}); });
}

}  // namespace

uint64_t kv_recall_scratch(const ModelShape& model, const SessionShape& session, const Card&) {
  return session.recalls ? Scratch::bytes(model, session) : 0;
}

// The listed entries move together, then up to open gaps, and the rows go into the gaps.
void kv_recall(const Launch& l, const KvRecall& op) {
  constexpr uint32_t kBlocks = 8;  // of a head, for its list and its rows
  const KvRecallParams& p = op.p;
  const Scratch scratch(l, p);
  const RecalledRows rows{data<uint32_t>(op.count), data<int32_t>(op.row_pos)};
  const HeadState* const heads = l.heads + p.head_state;
  launch(l, copy_lists_kernel, dim3(kBlocks, p.heads), kThreads, 0, p, data<uint32_t>(op.list), scratch);
  compact(l,
          {.list = op.list,
           .chunk_k = {},
           .chunk_v = {},
           .chunk_pos = {},
           .chunk_cis = {},
           .k = op.k,
           .v = op.v,
           .pos = op.pos,
           .cis = op.cis,
           .p = {.first_head = p.first_head,
                 .heads = p.heads,
                 .head_dim = p.head_dim,
                 .chunk_capacity = 0,
                 .head_state = p.head_state,
                 .list_capacity = p.list_capacity}},
          scratch.lists);
  launch(l, find_places_kernel, dim3(kBlocks, p.heads), kThreads, 0, heads, p, data<int32_t>(op.pos), rows,
         scratch);
  const SlicedRows sliced(op.k, op.v, p.head_dim);
  with_unit(sliced, {data<void>(op.k.values), data<void>(op.v.values)}, [&]<typename Vector>(Vector) {
    launch(l, open_gaps_kernel<Vector>, dim3(sliced.k_slices + sliced.v_slices + 2, p.heads), kGapThreads, 0,
           heads, p, data<Vector>(op.k.values), data<Vector>(op.v.values), data<uint32_t>(op.pos),
           data<uint32_t>(op.cis), sliced, rows, scratch);
  });
  put_rows(l, op, op.row_k, op.k, nullptr, nullptr, rows, scratch);
  put_rows(l, op, op.row_v, op.v, data<int32_t>(op.pos), data<float>(op.cis), rows, scratch);
}

}  // namespace thimble::cuda
