// top_k with several blocks per head and four kernels: for cards without clusters, and for more keys than the
// shared memory of a block holds.
#include <algorithm>

#include "backends/cuda/select/top_k_list.cuh"

namespace thimble::cuda::topk {
namespace {

// Blocks per head: a multiprocessor runs at least two at once. Each block adds the histograms of all, so more
// than 16 would not pay: with 131,072 keys a block then reads 32 KiB of keys, and 128 KiB of histograms from
// the second-level cache.
uint32_t blocks_of_head(const Card& card, uint32_t heads) {
  return std::clamp(2 * card.multiprocessors / heads, 1u, 16u);
}

// The window that remains after the passes so far.
struct Known {
  Window window;
  uint32_t wanted;  // how many of its keys are picked
};

struct Scratch {
  uint32_t* histograms;  // [2][heads][parts][kBins]: for even and odd passes
  Known* known;          // [kPasses - 1][heads] after a pass
  uint32_t* totals;      // [heads][parts]: one more than a part picked; 0: unknown yet
  uint32_t* ticket;      // number of blocks that have started
  uint32_t heads, parts;
  uint64_t bytes;

  Scratch(std::byte* base, uint32_t n_heads, uint32_t n_parts) : heads(n_heads), parts(n_parts) {
    uint64_t end = 0;
    const auto place = [&](uint64_t size) {
      std::byte* at = base + end;
      end += round_up(size, 256);
      return at;
    };
    histograms = reinterpret_cast<uint32_t*>(place(uint64_t(2) * heads * parts * kBins * sizeof(uint32_t)));
    known = reinterpret_cast<Known*>(place(uint64_t(kPasses - 1) * heads * sizeof(Known)));
    totals = reinterpret_cast<uint32_t*>(place(uint64_t(heads) * parts * sizeof(uint32_t)));
    ticket = reinterpret_cast<uint32_t*>(place(sizeof(uint32_t)));
    bytes = end;
  }
  __device__ uint32_t* histogram(uint32_t pass, uint32_t head, uint32_t part) const {
    return histograms + ((uint64_t(pass % 2) * heads + head) * parts + part) * kBins;
  }
};

// The window after the previous kernel has counted for `pass`; b.found is that pass's bin.
__device__ Known narrowed(Shared& b, const Scratch& scratch, const HeadWork& w, uint32_t head,
                          uint32_t pass) {
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) {
    uint32_t sum = 0;
#pragma unroll 8
    for (uint32_t part = 0; part < scratch.parts; ++part) sum += scratch.histogram(pass, head, part)[bin];
    b.bins[0][bin] = sum;
  }
  __syncthreads();
  sum_bins<1>(b, 0, 0);
  __syncthreads();
  const Known before =
      pass ? scratch.known[(pass - 1) * scratch.heads + head] : Known{Window::over(0, ~0u), w.wanted};
  const Found found = find_bin<1>(b, 0, before.wanted);
  return {before.window.within(found.bin), found.wanted};
}

// Counts the keys of the remaining window; a block counts a part of the candidates of a head.
__global__ void __launch_bounds__(kThreads) count_kernel(Operands o, Scratch scratch, uint32_t pass) {
  begin_kernel();
  __shared__ Shared b;
  const uint32_t part = blockIdx.x, head = blockIdx.y;
  const StepParams s = *o.step;
  const HeadState state = o.heads[head];
  if (pass == 0 && part == 0) {  // for list_kernel
    if (threadIdx.x < scratch.parts) scratch.totals[head * scratch.parts + threadIdx.x] = 0;
    if (head == 0 && threadIdx.x == 0) *scratch.ticket = 0;
  }
  if (task(o, s, state, selection_cached(o.gate)) != Task::kPick) return;
  if (head > 0 && o.p.by_position) return;  // one threshold serves all heads
  const HeadWork w = head_work(o, s, state, head);
  if (!w.picks_some()) return;
  Window window = Window::over(0, ~0u);
  if (pass > 0) {
    const Known known = narrowed(b, scratch, w, head, pass - 1);
    window = known.window;
    if (part == 0 && threadIdx.x == 0) scratch.known[(pass - 1) * scratch.heads + head] = known;
  }
  __syncthreads();
  clear(b.bins[0], kBins);
  __syncthreads();
  count_keys(b.bins[0], ScoreKeys{w.scores}, w.candidates.part(part, scratch.parts), window);
  __syncthreads();
  uint32_t* to = scratch.histogram(pass, head, part);
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) to[bin] = b.bins[0][bin];
}

// Computed from the counts of all passes.
__device__ Threshold find_threshold(Shared& b, const Scratch& scratch, const HeadWork& w, uint32_t head) {
  const Known known = narrowed(b, scratch, w, head, kPasses - 1);
  const uint32_t key = known.window.low;
  uint32_t wanted = known.wanted;
  if (wanted == b.found.count) return {key, 0};
  uint32_t part = scratch.parts - 1;  // the part with the last tie that is picked
  for (;; --part) {
    const uint32_t ties = scratch.histogram(kPasses - 1, head, part)[b.found.bin];
    if (wanted <= ties) break;
    wanted -= ties;
  }
  const Range range = w.candidates.part(part, scratch.parts);
  return {key, tie_from_end(b, ScoreKeys{w.scores}, key, range, wanted)};
}

// Writes the lists. A block lists a part of the units of a head and keeps one bit per unit in shared memory.
__global__ void __launch_bounds__(kThreads) list_kernel(Operands o, Scratch scratch) {
  begin_kernel();
  __shared__ Shared b;
  extern __shared__ uint32_t shared[];
  const StepParams s = *o.step;
  // Blocks take their parts in the order in which they start, so a block only waits for blocks that run.
  if (threadIdx.x == 0) b.number = atomicAdd(scratch.ticket, 1u);
  __syncthreads();
  const uint32_t head = b.number / scratch.parts, part = b.number % scratch.parts;
  __syncthreads();
  const HeadState state = o.heads[head];
  const Task t = task(o, s, state, selection_cached(o.gate));
  if (t == Task::kListEverything)
    return list_everything(step_entries(s, state), list_of(o, head), part, scratch.parts);
  if (t == Task::kRenewLocal) {
    if (part == 0) renew_local(s, step_entries(s, state), list_of(o, head));
    return;
  }

  const HeadWork w = head_work(o, s, state, head);
  const Threshold threshold =
      w.picks_some() ? find_threshold(b, scratch, w, o.p.by_position ? 0 : head) : trivial_threshold(w);
  const Range own = w.middle.part(part, scratch.parts);
  mark_picked(b, own, ScoreKeys{w.scores}, w.pos, threshold, shared);
  volatile uint32_t* totals = scratch.totals + head * scratch.parts;
  if (threadIdx.x == 0) totals[part] = b.marked + 1;
  if (warp() == 0) {
    uint32_t total = 1;
    if (lane() < part)
      while ((total = totals[lane()]) == 0) {
      }
    const uint32_t before = __reduce_add_sync(~0u, total - 1);
    if (lane() == 0) b.number = before;
  }
  __syncthreads();
  const uint32_t before = b.number;
  uint32_t* list = list_of(o, head);
  write_marked(b, own, o.p.page, shared, list + 1 + (w.middle.begin + before) * o.p.page);
  if (part == scratch.parts - 1) list_ends(w, o.p.page, before + b.marked, list, 0, 1);
}

}  // namespace

void launch_several_kernels(const Launch& l, const Operands& o, const Most& most) {
  const Scratch scratch(l.scratch, o.p.heads, blocks_of_head(l.card, o.p.heads));
  for (uint32_t pass = 0; pass < kPasses; ++pass)
    launch(l, count_kernel, dim3(scratch.parts, o.p.heads), kThreads, 0, o, scratch, pass);
  const uint32_t marks = mark_words(most.units, scratch.parts) * sizeof(uint32_t);
  // With its static shared memory this may exceed what a kernel gets without asking.
  if (*l.error == cudaSuccess) *l.error = allow_shared(reinterpret_cast<const void*>(list_kernel), marks);
  launch(l, list_kernel, scratch.parts * o.p.heads, kThreads, marks, o, scratch);
}

uint64_t several_kernels_scratch(const Card& card, uint32_t heads) {
  return Scratch(nullptr, heads, blocks_of_head(card, heads)).bytes;
}

}  // namespace thimble::cuda::topk
