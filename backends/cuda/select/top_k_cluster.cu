// top_k in one kernel: a cluster of blocks per head with the keys in its shared memory, or one block while
// the keys fit there.
#include <algorithm>

#include "backends/cuda/select/top_k_list.cuh"
#include "backends/cuda/select/top_k_votes.cuh"

namespace thimble::cuda::topk {
namespace {

constexpr uint32_t kRanks = 8;  // blocks per cluster; kMostRanks if there are more candidates than this
constexpr uint32_t kManyCandidates = 1 << 16;

// Fetches the keys that are kept, and the samples.
__device__ void fetch_keys(Shared& b, const HeadWork& w, const KeptKeys& keys) {
  for (uint32_t i = threadIdx.x; i < keys.kept; i += kThreads)
    copy_async<4>(keys.shared + i, w.scores.at(keys.first + i));
  commit_copies();
  put_sample(b, *w.scores.at(sampled(w)));
  wait_copies<0>();
  keys.convert();
  __syncthreads();
}

// The threshold of the competing keys; `own` is this block's range of them.
template <uint32_t kBlocks>
__device__ Threshold find_threshold(Shared& b, const HeadWork& w, const KeptKeys& keys, Range own,
                                    uint32_t rank) {
  Window window = sampled_window(b, w.wanted, w.candidates.size());

  Found found{0, w.wanted, 0};
  for (uint32_t pass = 0;; ++pass) {
    const uint32_t turn = pass % 2;
    count_keys(b.bins[turn], keys, own, window);
    __syncthreads();
    sum_bins<kBlocks>(b, turn, rank);
    cluster_barrier<kBlocks>();
    found = find_bin<kBlocks>(b, turn, found.wanted);
    window = found.bin < kBins ? window.within(found.bin) : Window::over(0, window.low - 1);
    if (found.bin < kBins &&
        (found.wanted == found.count || found.count <= kFew || window.low == window.high))
      break;
    if (pass > 0) {  // the others read these bins before they reached the last barrier
      clear(b.bins[1 - turn], kBins);
      __syncthreads();
    }
  }
  if (found.wanted == found.count) return {window.low, 0};
  if (found.count <= kFew) {
    uint32_t before = 0;
#pragma unroll
    for (uint32_t r = 0; r < kBlocks; ++r) before += r < rank ? b.shares[r] : 0;
    keys.for_each(own, [&](uint32_t i, uint32_t key) {
      if (!window.contains(key)) return;
      uint64_t* const at = b.few + before + atomicAdd(&b.gathered, 1u);
#pragma unroll 1
      for (uint32_t r = 0; r < kBlocks; ++r) *of_rank<kBlocks>(at, r) = uint64_t(key) << 32 | i;
    });
    cluster_barrier<kBlocks>();
    const uint32_t larger = larger_ones(b, found.count);
    if (looked_at() < found.count && threadIdx.x % kComparing == 0 && larger == found.wanted - 1) {
      const uint64_t last = b.few[looked_at()];
      b.threshold = {static_cast<uint32_t>(last >> 32), static_cast<uint32_t>(last)};
    }
    __syncthreads();
    return b.threshold;
  }
  uint32_t tied = kBlocks - 1, wanted = found.wanted;  // the block with the last tie that is picked
  for (; b.shares[tied] < wanted; --tied) wanted -= b.shares[tied];
  if (rank == tied) {
    const uint32_t last = tie_from_end(b, keys, window.low, own, wanted);
    if (threadIdx.x < kBlocks) *of_rank<kBlocks>(&b.cut, threadIdx.x) = last;
  }
  cluster_barrier<kBlocks>();
  return {window.low, b.cut};
}

// Shared memory: Shared, one bit for each unit of the block's part, `kept` keys. kVotes: the scores are votes
// of a group, which this kernel makes. It is a template parameter because otherwise registers that the other
// case does not need would spill.
template <uint32_t kBlocks, bool kVotes>
__global__ void THIMBLE_CLUSTER(kBlocks) __launch_bounds__(kThreads, 2)
    top_k_kernel(Operands o, uint32_t marks, uint32_t kept) {
  extern __shared__ uint32_t shared[];
  Shared& b = *reinterpret_cast<Shared*>(shared);
  uint32_t* const own_marks = shared + sizeof(Shared) / sizeof(uint32_t);
  const uint32_t rank = blockIdx.x, head = blockIdx.y;
  release_successor();
  const StepParams s = *o.step;  // loaded while the bins are cleared
  const HeadState state = o.heads[head];
  arrive_at_cluster_barrier<kBlocks>();  // blocks may access each other's memory only once all have started
  clear(b.bins[0], 2 * kBins);
  if (threadIdx.x == 0) b.gathered = 0;
  HeadBlocks scorers{};
  if constexpr (kVotes) {
    o.p.keep = kKeepOfStep;
    o.p.page = 1;
    o.p.by_position = o.p.in_runs = 0;
    o.chunk_scores = nullptr;
    if (const ScoreParts& sums = o.ballot.sums; sums.sums)
      scorers = blocks_of_head(head, sums.each, o.p.heads, ScoredHeads{s, sums.heads, 1});
  }
  wait_at_cluster_barrier<kBlocks>();
  await_predecessor();
  uint32_t* const list = list_of(o, head);
  const Task t = task(o, s, state, selection_cached(o.gate));
  if (t == Task::kListEverything) return list_everything(step_entries(s, state), list, rank, kBlocks);
  if (t == Task::kRenewLocal) {
    if (rank == 0) renew_local(s, step_entries(s, state), list);
    return;
  }

  const HeadWork w = head_work(o, s, state, head);
  const Range own = w.candidates.part(rank, kBlocks);
  const KeptKeys keys{w.scores, own_marks + marks, own.begin, min(kept, own.size())};
  if constexpr (kVotes)
    make_votes(b, o.ballot, scorers, w, keys, own, rank, head);
  else if (w.picks_some())
    fetch_keys(b, w, keys);
  const Threshold threshold =
      w.picks_some() ? find_threshold<kBlocks>(b, w, keys, own, rank) : trivial_threshold(w);
  // Without positions, a block lists entries whose keys it holds.
  const Range listed = w.pos ? w.middle.part(rank, kBlocks) : own.within(w.middle);
  mark_picked(b, listed, keys, w.pos, threshold, own_marks);
  if (threadIdx.x < kBlocks) *of_rank<kBlocks>(&b.picked[rank], threadIdx.x) = b.marked;
  cluster_barrier<kBlocks>();
  uint32_t before = 0, all = 0;
#pragma unroll
  for (uint32_t r = 0; r < kBlocks; ++r) {
    if (r < rank) before += b.picked[r];
    all += b.picked[r];
  }
  write_marked(b, listed, o.p.page, own_marks, list + 1 + (w.middle.begin + before) * o.p.page);
  list_ends(w, o.p.page, all, list, rank, kBlocks);
  if constexpr (kVotes) store_votes<kBlocks>(o.ballot, w, keys, rank, head);
}

// ---- recording ----

// Bytes of shared memory in each of `ranks` blocks that hold all keys.
uint64_t shared_bytes(const Most& most, uint32_t ranks) {
  return sizeof(Shared) +
         (mark_words(most.units, ranks) + kWarp * mark_words(most.candidates, ranks)) * sizeof(uint32_t);
}
// The same, limited to what a block can have; keys that do not fit are read again.
uint64_t shared_bytes(const Card& card, const Most& most, uint32_t ranks) {
  return std::min<uint64_t>(shared_bytes(most, ranks), card.shared_bytes);
}

// Whether the card can run this many clusters at once, of blocks with this much shared memory.
template <uint32_t kBlocks, bool kVotes>
bool clusters_fit(const Launch& l, uint64_t bytes, uint32_t clusters) {
  const auto kernel = top_k_kernel<kBlocks, kVotes>;
  // Not every card supports clusters of more than 8 blocks, and a kernel has to ask for them.
  if ((kBlocks > 8 &&
       cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) ||
      allow_shared(reinterpret_cast<const void*>(kernel), bytes) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocks, clusters);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = bytes;
  config.stream = l.stream;
  cudaLaunchAttribute dimension{};
  dimension.id = cudaLaunchAttributeClusterDimension;
  dimension.val.clusterDim = {kBlocks, 1, 1};
  config.attrs = &dimension;
  config.numAttrs = 1;
  int fit = 0;
  if (cudaOccupancyMaxActiveClusters(&fit, kernel, &config) == cudaSuccess)
    return fit >= static_cast<int>(clusters);
  cudaGetLastError();
  return false;
}

template <uint32_t kBlocks, bool kVotes>
void launch_cluster(const Launch& l, const Operands& o, const Most& most) {
  const uint32_t marks = mark_words(most.units, kBlocks);
  uint64_t bytes = shared_bytes(l.card, most, kBlocks);
  const uint64_t kept = (bytes - sizeof(Shared)) / sizeof(uint32_t) - marks;
  // A list from 16,740 entries takes 13 us if two blocks of a cluster are on one multiprocessor, 10 us if
  // they are on two. If possible, a block therefore asks for more than half of the shared memory.
  const uint64_t alone = std::max<uint64_t>(bytes, l.card.shared_bytes / 2 + 1024);
  if (kBlocks > 1 && kBlocks * o.p.heads <= l.card.multiprocessors &&
      clusters_fit<kBlocks, kVotes>(l, alone, o.p.heads))
    bytes = alone;
  launch(l, top_k_kernel<kBlocks, kVotes>, dim3(kBlocks, o.p.heads), kThreads, bytes, o, marks,
         static_cast<uint32_t>(kept));
}

template <bool kVotes>
void launch_clusters(const Launch& l, const Operands& o, const Most& most) {
  const bool many = most.candidates > kManyCandidates &&
                    clusters_fit<kMostRanks, kVotes>(l, shared_bytes(l.card, most, kMostRanks), o.p.heads);
  many ? launch_cluster<kMostRanks, kVotes>(l, o, most) : launch_cluster<kRanks, kVotes>(l, o, most);
}

}  // namespace

bool takes_one_kernel(const Card& card, const Most& most) {
  return card.major >= 9 || shared_bytes(most, 1) <= card.shared_bytes;
}

void launch_one_kernel(const Launch& l, const Operands& o, const Most& most) {
  if (l.card.major < 9) return launch_cluster<1, false>(l, o, most);
  o.ballot.scores ? launch_clusters<true>(l, o, most) : launch_clusters<false>(l, o, most);
}

}  // namespace thimble::cuda::topk
