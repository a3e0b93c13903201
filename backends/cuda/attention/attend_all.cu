// attend_all: makes a view of a run, the step's rows and the pages of a store, in the order of positions, and
// attends to it, in as many passes as the view is too small for. The store may be in host memory: each of its
// rows crosses the bus once.
#include <algorithm>

#include "backends/cuda/attention/attention.h"
#include "backends/cuda/copy_row.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/positions.cuh"
#include "backends/cuda/rope.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp;

// A page that the step reads. The entries before its first position: `before` in the store, `run_before` in
// the run.
struct StoredPage {
  uint32_t slot, held, before, run_before;
  int32_t number;
};

// In scratch: the pages of each head by ascending number, how many entries each head has in all, the view of
// them in f16, and what passes tell each other.
struct Scratch {
  uint32_t capacity;   // entries of the view
  StoredPage* pages;   // [heads][page_capacity]
  uint32_t* counts;    // [heads], which attend_view reads as lists without entries
  __half *k, *v;       // [heads][capacity][head_dim]
  float2* ml;          // [rows][query heads]
  uint64_t bytes = 0;  // where the scratch of attend_view begins

  Scratch(std::byte* base, uint32_t heads, uint32_t queries, uint32_t head_dim, uint32_t page_capacity,
          uint32_t rows) {
    constexpr uint64_t kViewBytes = 16 << 20, kFewest = 1024;
    const uint64_t entry_bytes = uint64_t(heads) * head_dim * sizeof(__half);
    capacity = static_cast<uint32_t>(std::max(kFewest, kViewBytes / (2 * entry_bytes)));
    const auto place = [&]<typename T>(T*& array, uint64_t count) {
      array = reinterpret_cast<T*>(base + bytes);
      bytes += round_up(count * sizeof(T), 256);
    };
    place(pages, uint64_t(heads) * page_capacity);
    place(counts, heads);
    place(k, capacity * entry_bytes / sizeof(__half));
    place(v, capacity * entry_bytes / sizeof(__half));
    place(ml, uint64_t(rows) * queries);
  }
};

// The store of a layer, as the op has it.
struct Store {
  const uint4* pages;
  const uint32_t *order, *count;
};

// A block lists the pages of a head. If the op does nothing without a store, and no head has one, all heads
// have 0 entries.
__global__ void __launch_bounds__(kThreads)
    list_pages_kernel(const StepParams* steps, const HeadState* heads, AttendAllParams p, bool chunked,
                      Store store, const int32_t* pos, Scratch scratch) {
  __shared__ uint32_t sums[kWarps];
  const StepParams step = begin_kernel(steps);
  const uint32_t head = p.first_head + blockIdx.x, count = store.count[head], lane = threadIdx.x % kWarp,
                 warp = threadIdx.x / kWarp;
  const HeadState state = heads[head];
  const uint32_t entries = step_entries(step, state), in_run = chunked ? state.n_entries : entries;
  const uint64_t words = uint64_t(head) * p.stored_stride * (64 / sizeof(uint32_t));
  const uint32_t* const order = store.order + words;
  const uint4* const pages = store.pages + words / 4;
  uint32_t before = 0;
  for (uint32_t first = 0; first < count; first += kThreads) {
    const uint32_t i = first + threadIdx.x;
    StoredPage page{};
    if (i < count) {
      page.slot = order[i];
      const uint4 of_page = pages[page.slot];
      page.number = static_cast<int32_t>(of_page.x);
      page.held = of_page.y & 0xffff;
      page.run_before = lower_bound(pos + state.first, in_run, page.number * int32_t{kStoredPage});
    }
    uint32_t sum = __popc(page.held);
#pragma unroll
    for (uint32_t apart = 1; apart < kWarp; apart *= 2) {
      const uint32_t lower = __shfl_up_sync(~0u, sum, apart);
      if (lane >= apart) sum += lower;
    }
    __syncthreads();  // the sums of the pages before were read
    if (lane == kWarp - 1) sums[warp] = sum;
    __syncthreads();
    uint32_t all = 0;
    for (uint32_t w = 0; w < kWarps; ++w) {
      if (w < warp) sum += sums[w];
      all += sums[w];
    }
    page.before = before + sum - __popc(page.held);
    if (i < count) scratch.pages[uint64_t(head) * p.page_capacity + i] = page;
    before += all;
  }
  if (threadIdx.x) return;
  bool any = !p.if_stored;
  for (uint32_t h = 0; h < p.heads; ++h) any |= store.count[p.first_head + h] != 0;
  scratch.counts[head] = any ? entries + before : 0;
}

// Rows that become keys or values of the view. `rope.pairs`: 0 if they do not rotate.
template <typename Format>
struct Rows {
  const typename Format::Unit *run, *chunk, *stored;
  uint64_t stored_stride;  // units between heads in `stored`
  Rope rope;
  __half* view;
};

// The warp writes one row of the view, if this pass has the entry of this rank.
template <typename Format>
__device__ void view_row(const AttendAllParams& p, const typename Format::Unit* from,
                         const Rows<Format>& rows, uint32_t head, uint32_t rank, uint32_t first,
                         uint32_t capacity, RowBuffer& buffer) {
  if (rank < first || rank - first >= capacity) return;
  __syncwarp();  // the buffer's last row was converted
  copy_words(from, buffer.words, row_words<Format>(p.head_dim));
  __syncwarp();
  const auto* const row = reinterpret_cast<const typename Format::Unit*>(buffer.words);
  __half* const to = rows.view + (uint64_t(head) * capacity + rank - first) * p.head_dim;
  for (uint32_t pair = threadIdx.x % kWarp; pair < p.head_dim / 2; pair += kWarp) {
    const bool rotates = pair < rows.rope.pairs;
    const uint32_t c0 = rotates ? first_of_pair(pair, p.rope.pairing) : 2 * pair,
                   c1 = rotates ? second_of_pair(pair, p.rope.pairing, rows.rope.pairs) : 2 * pair + 1;
    const float x = Format::load(row, p.head_dim, c0), y = Format::load(row, p.head_dim, c1);
    const float2 angle = rotates ? rows.rope.angle(rank, pair) : float2{1, 0};
    to[c0] = __float2half_rn(x * angle.x - y * angle.y);
    to[c1] = __float2half_rn(x * angle.y + y * angle.x);
  }
}

// The entries of the run and the step's rows.
template <typename Format>
__global__ void __launch_bounds__(kThreads)
    view_run_kernel(const StepParams* steps, const HeadState* heads, AttendAllParams p, const int32_t* pos,
                    const uint32_t* count, Rows<Format> rows, Scratch scratch, uint32_t first) {
  __shared__ RowBuffer buffers[kWarps];
  const StepParams step = begin_kernel(steps);
  const uint32_t head = p.first_head + blockIdx.y, warp = threadIdx.x / kWarp, pages = count[head],
                 units = Format::row_units(p.head_dim), all = scratch.counts[head];
  if (all <= first) return;
  const HeadState state = heads[head];
  const StoredPage* const page = scratch.pages + uint64_t(head) * p.page_capacity;
  const uint32_t entries = step_entries(step, state), in_run = rows.chunk ? state.n_entries : entries;
  for (uint32_t entry = blockIdx.x * kWarps + warp; entry < entries; entry += gridDim.x * kWarps) {
    uint32_t rank = all - entries + entry;  // of the step's rows, which come last
    const typename Format::Unit* from;
    if (entry < in_run) {
      const int32_t position = pos[state.first + entry], number = position / int32_t{kStoredPage};
      uint32_t low = 0, high = pages;
      while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (page[middle].number < number)
          low = middle + 1;
        else
          high = middle;
      }
      if (low < pages) {
        rank = entry + page[low].before;
        if (page[low].number == number)
          rank += __popc(page[low].held & ((1u << position % int32_t{kStoredPage}) - 1));
      }
      from = rows.run + (uint64_t(state.first) + entry) * units;
    } else {
      from = rows.chunk + (uint64_t(head) * p.chunk_capacity + entry - in_run) * units;
    }
    view_row(p, from, rows, head, rank, first, scratch.capacity, buffers[warp]);
  }
}

// The entries of the store.
template <typename Format>
__global__ void __launch_bounds__(kThreads)
    view_stored_kernel(const StepParams* steps, const HeadState* heads, AttendAllParams p, bool chunked,
                       const int32_t* pos, const uint32_t* count, uint32_t page_units, Rows<Format> rows,
                       Scratch scratch, uint32_t first) {
  __shared__ RowBuffer buffers[kWarps];
  const StepParams step = begin_kernel(steps);
  const uint32_t head = p.first_head + blockIdx.y, warp = threadIdx.x / kWarp,
                 units = Format::row_units(p.head_dim), places = count[head] * kStoredPage;
  if (scratch.counts[head] <= first) return;
  const HeadState state = heads[head];
  const uint32_t in_run = chunked ? state.n_entries : step_entries(step, state);
  const int32_t* const in_pos = pos + state.first;
  for (uint32_t i = blockIdx.x * kWarps + warp; i < places; i += gridDim.x * kWarps) {
    const StoredPage page = scratch.pages[uint64_t(head) * p.page_capacity + i / kStoredPage];
    const uint32_t place = i % kStoredPage;
    if (!(page.held >> place & 1)) continue;
    const int32_t position = page.number * int32_t{kStoredPage} + static_cast<int32_t>(place);
    uint32_t in_run_before = page.run_before;
    while (in_run_before < in_run && in_pos[in_run_before] < position) ++in_run_before;
    const uint32_t rank = page.before + __popc(page.held & ((1u << place) - 1)) + in_run_before;
    view_row(p, rows.stored + head * rows.stored_stride + uint64_t(page.slot) * page_units + place * units,
             rows, head, rank, first, scratch.capacity, buffers[warp]);
  }
}

// The keys or the values of one pass.
void view_rows(const Launch& l, const AttendAll& op, const KvArray& run, const KvArray& chunk,
               const KvArray& stored, uint64_t page_bytes, const Rope& rope, __half* view,
               const Scratch& scratch, uint32_t first) {
  const AttendAllParams& p = op.p;
  const HeadState* const heads = l.heads + p.head_state;
  const auto* const pos = data<int32_t>(op.pos);
  const auto* const count = data<uint32_t>(op.count);
  const auto enough = static_cast<uint32_t>(ceil_div(8 * l.card.multiprocessors, p.heads));
  const auto blocks = [&](uint32_t rows) {
    return dim3(std::min(enough, static_cast<uint32_t>(ceil_div(rows, kWarps))), p.heads);
  };
  with_format(run.type, [&]<typename Format>(Format) {
    using Unit = typename Format::Unit;
    const Rows<Format> rows{data<Unit>(run.values), data<Unit>(chunk.values), nullptr, 0, rope, view};
    launch(l, view_run_kernel<Format>, blocks(static_cast<uint32_t>(op.pos.bytes / sizeof(int32_t))),
           kThreads, 0, l.step, heads, p, pos, count, rows, scratch, first);
  });
  with_format(stored.type, [&]<typename Format>(Format) {
    using Unit = typename Format::Unit;
    const Rows<Format> rows{
        nullptr, nullptr, data<Unit>(stored.values), uint64_t(p.rows_stride) * 64 / sizeof(Unit), rope, view};
    launch(l, view_stored_kernel<Format>, blocks(p.page_capacity * kStoredPage), kThreads, 0, l.step, heads,
           p, static_cast<bool>(op.chunk_k), pos, count, static_cast<uint32_t>(page_bytes / sizeof(Unit)),
           rows, scratch, first);
  });
}

}  // namespace

uint64_t attend_all_scratch(const ModelShape& m, const SessionShape& s, const Card& c) {
  if (!s.stored_pages) return 0;
  return Scratch(nullptr, m.kv_heads, m.heads, m.head_dim, s.stored_pages, s.chunk).bytes +
         attend_view_scratch(m, s, c);
}

void attend_all(const Launch& l, const AttendAll& op) {
  const AttendAllParams& p = op.p;
  // A run has at most as many entries as the layer.
  const uint32_t heads = p.first_head + p.heads,
                 in_run = static_cast<uint32_t>(op.pos.bytes / sizeof(int32_t)),
                 most = in_run + l.max_rows + p.page_capacity * kStoredPage;
  const Scratch scratch(l.scratch, heads, heads * p.group, p.head_dim, p.page_capacity, l.max_rows);
  const Rope rope{data<float2>(op.rope), p.rope.n_rot / 2},
      of_keys{rope.table, p.rope.mode == kRopeList ? rope.pairs : 0};
  const bool chunked = static_cast<bool>(op.chunk_k);
  const uint64_t page_bytes =
      kStoredPage * (kv_bytes(op.stored_k.type, p.head_dim) + kv_bytes(op.stored_v.type, p.head_dim));
  launch(l, list_pages_kernel, p.heads, kThreads, 0, l.step, l.heads + p.head_state, p, chunked,
         Store{data<uint4>(op.pages), data<uint32_t>(op.order), data<uint32_t>(op.count)},
         data<int32_t>(op.pos), scratch);
  CudaBuffer memory;
  memory.address = l.scratch;
  const auto in_scratch = [&](const void* first) {
    const auto at = static_cast<uint64_t>(static_cast<const std::byte*>(first) - l.scratch);
    return View{&memory, at, scratch.bytes - at};
  };
  Attention attention{.q = op.q,
                      .k = {in_scratch(scratch.k)},
                      .v = {in_scratch(scratch.v)},
                      .list = in_scratch(scratch.counts),
                      .rope = op.rope,
                      .sinks = op.sinks,
                      .y = op.y,
                      .ml = in_scratch(scratch.ml),
                      .p = {.first_head = p.first_head,
                            .heads = p.heads,
                            .group = p.group,
                            .head_dim = p.head_dim,
                            .row_stride = p.row_stride,
                            .y_stride = p.y_stride,
                            .source = kFromView,
                            .first_entry = 0,
                            .view_capacity = scratch.capacity,
                            .head_state = p.head_state,
                            .list_capacity = 1,
                            .window = 0,
                            .equal_heads = 0,
                            .scale = p.scale,
                            .cap = p.cap,
                            .rope = p.rope}};
  Launch attending = l;
  attending.scratch += scratch.bytes;
  attending.scratch_bytes -= scratch.bytes;
  for (uint32_t first = 0; first < most; first += scratch.capacity) {
    view_rows(l, op, op.k, op.chunk_k, op.stored_k, page_bytes, of_keys, scratch.k, scratch, first);
    view_rows(l, op, op.v, op.chunk_v, op.stored_v, page_bytes, {rope.table, 0}, scratch.v, scratch, first);
    attention.p.first_entry = first;
    attend_view(attending, attention);
  }
}

}  // namespace thimble::cuda
