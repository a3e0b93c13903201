// page_score: for each query head and each page of the middle, the largest product that a key within the
// page's bounds can have. A few adjacent lanes share a page and a warp has several pages at once, as in
// decode attention (pool_rows.cuh). The bounds of a page are read once for 4 or 8 query heads.
#include <algorithm>

#include "backends/cuda/attention/pool_rows.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/rope.cuh"
#include "backends/cuda/select/score_parts.cuh"

namespace thimble::cuda {

constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp;
constexpr uint32_t kBlocksEach = 2;  // per multiprocessor, which has 64 KiB of bounds in flight

// Grid: (block among those of a KV head, pass over its group). Warp w of a head's block b processes step w *
// blocks + b, and so on. `heads`: those of the op. `parts`: the blocks' contributions to a head's
// log-sum-exp.
template <uint32_t kLanes, uint32_t kHeads>
static __global__ void __launch_bounds__(kThreads, kBlocksEach)
    page_score_kernel(const StepParams* step, const HeadState* heads, PageScoreParams p, const float* q,
                      const uint4* bounds, Rope rope, float* all_scores, LogSum* parts) {
  using S = Step<kLanes, kHeads>;
  constexpr uint32_t kChannels = kLanes * 8;
  __shared__ float queries[kHeads][kChannels];
  __shared__ LogSum of_warp[kHeads][kWarps];
  release_successor();
  const StepParams s = *step;
  const ScoredHeads scored{s, heads, p.page};
  const HeadBlocks own_blocks = blocks_around(scored);
  const uint32_t n = own_blocks.work;
  await_predecessor();
  if (n == 0) return;

  const uint32_t head = p.first_head + own_blocks.head, first_head = blockIdx.z * kHeads;
  const uint32_t group_heads = min(kHeads, p.group - first_head), first_query = head * p.group + first_head;
  for (uint32_t i = threadIdx.x; i < kHeads * kChannels; i += kThreads) {
    const uint32_t h = i / kChannels, c = i % kChannels;
    float x = 0;
    if (h < group_heads && c < p.head_dim) {
      const float* own = q + (first_query + h) * p.head_dim;
      x = p.rope.mode == kRopeOriginal
              ? rotated_channel(own, c, static_cast<uint32_t>(s.position), rope, p.rope.pairing)
              : own[c];
    }
    queries[h][c] = x;
  }
  __syncthreads();
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t chunk = lane % kLanes, side = lane / kLanes;
  float query[kHeads][8];
#pragma unroll
  for (uint32_t h = 0; h < kHeads; ++h)
#pragma unroll
    for (uint32_t c = 0; c < 8; ++c) query[h][c] = queries[h][chunk * 8 + c];

  // A page is [2][chunks] of 8 channels.
  const uint32_t chunks = p.head_dim / 8, block = block_of_heads() - own_blocks.first;
  const uint32_t first_page = heads[own_blocks.head].first / p.page + head + s.n_init;
  const uint4* const own_bounds = bounds + uint64_t(first_page) * 2 * chunks + chunk;
  const uint32_t own_head = lane % kHeads, own_row = chunk / kHeads * S::kAtOnce + side;
  float* const own_scores = all_scores + uint64_t(first_query + own_head) * p.score_capacity + s.n_init;
  LogSum total = kNoSum;
  for (uint32_t first = (warp * own_blocks.count + block) * S::kRows; first < n;
       first += own_blocks.count * kWarps * S::kRows) {
    uint4 low[S::kRounds] = {}, high[S::kRounds] = {};
#pragma unroll
    for (uint32_t r = 0; r < S::kRounds; ++r) {
      const uint32_t page = first + r * S::kAtOnce + side;
      if (page >= n || chunk >= chunks) continue;
      low[r] = own_bounds[uint64_t(page) * 2 * chunks];
      high[r] = own_bounds[uint64_t(page) * 2 * chunks + chunks];
    }
    float scores[kLanes];  // [S::kRounds][kHeads]
#pragma unroll
    for (uint32_t r = 0; r < S::kRounds; ++r) {
      float smallest[8], largest[8];
      HalfRows::widen(low[r], smallest);
      HalfRows::widen(high[r], largest);
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h) {
        float sum = 0;
#pragma unroll
        for (uint32_t c = 0; c < 8; ++c) sum += fmaxf(query[h][c] * smallest[c], query[h][c] * largest[c]);
        scores[r * kHeads + h] = sum;
      }
    }
    const float score = sum_across<kLanes>(scores) * p.scale;
    if (first + own_row < n && own_head < group_heads) {
      own_scores[first + own_row] = score;
      add(total, score);
    }
  }

  // Reduce over lanes of the same head, then over warps.
  const LogSum sum = warp_log_sum(total, kHeads);
  if (lane < kHeads) of_warp[lane][warp] = sum;
  __syncthreads();
  for (uint32_t h = warp; h < group_heads; h += kWarps) {
    const LogSum of_head = warp_log_sum(first_part(of_warp[h], kWarps));
    if (lane == 0) parts[first_part_of(own_blocks, p.group, first_head + h) + block] = of_head;
  }
}

// The same for heads of more than 256 channels: a warp has a page, and a lane the chunks `lane`, `lane` + 32
// and so on of its bounds. Queries stay in shared memory.
template <uint32_t kHeads>
static __global__ void __launch_bounds__(kThreads, kBlocksEach)
    wide_page_score_kernel(const StepParams* step, const HeadState* heads, PageScoreParams p, const float* q,
                           const uint4* bounds, Rope rope, float* all_scores, LogSum* parts) {
  constexpr uint32_t kChunks = kMostHeadDim / 8, kEach = (kChunks + kWarp - 1) / kWarp;
  __shared__ float4 queries[kHeads][2 * kChunks];
  __shared__ LogSum of_warp[kHeads][kWarps];
  release_successor();
  const StepParams s = *step;
  const ScoredHeads scored{s, heads, p.page};
  const HeadBlocks own_blocks = blocks_around(scored);
  const uint32_t n = own_blocks.work;
  await_predecessor();
  if (n == 0) return;

  const uint32_t head = p.first_head + own_blocks.head, first_head = blockIdx.z * kHeads;
  const uint32_t group_heads = min(kHeads, p.group - first_head), first_query = head * p.group + first_head;
  for (uint32_t i = threadIdx.x; i < kHeads * kMostHeadDim; i += kThreads) {
    const uint32_t h = i / kMostHeadDim, c = i % kMostHeadDim;
    float x = 0;
    if (h < group_heads && c < p.head_dim) {
      const float* own = q + uint64_t(first_query + h) * p.head_dim;
      x = p.rope.mode == kRopeOriginal
              ? rotated_channel(own, c, static_cast<uint32_t>(s.position), rope, p.rope.pairing)
              : own[c];
    }
    reinterpret_cast<float*>(queries[h])[c] = x;
  }
  __syncthreads();
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, chunks = p.head_dim / 8,
                 block = block_of_heads() - own_blocks.first;
  const uint32_t first_page = heads[own_blocks.head].first / p.page + head + s.n_init;
  const uint4* const own_bounds = bounds + uint64_t(first_page) * 2 * chunks;
  const uint32_t own_head = lane % kHeads;
  float* const own_scores = all_scores + uint64_t(first_query + own_head) * p.score_capacity + s.n_init;
  LogSum total = kNoSum;
  for (uint32_t page = warp * own_blocks.count + block; page < n; page += own_blocks.count * kWarps) {
    const uint4* const low = own_bounds + uint64_t(page) * 2 * chunks;
    uint4 of_page[kEach][2] = {};
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t chunk = lane + i * kWarp;
      if (chunk >= chunks) continue;
      of_page[i][0] = low[chunk];
      of_page[i][1] = low[chunks + chunk];
    }
    float scores[kHeads] = {};
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t chunk = min(lane + i * kWarp, kChunks - 1);  // bounds of zeros after the last
      float smallest[8], largest[8];
      HalfRows::widen(of_page[i][0], smallest);
      HalfRows::widen(of_page[i][1], largest);
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h)
#pragma unroll
        for (uint32_t four = 0; four < 2; ++four) {
          const float4 x = queries[h][2 * chunk + four];
          const float of_query[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (uint32_t c = 0; c < 4; ++c)
            scores[h] += fmaxf(of_query[c] * smallest[4 * four + c], of_query[c] * largest[4 * four + c]);
        }
    }
    float score = sum_across<kHeads>(scores);
#pragma unroll
    for (uint32_t apart = kHeads; apart < kWarp; apart *= 2) score += __shfl_xor_sync(~0u, score, apart);
    score *= p.scale;
    if (lane < group_heads) {
      own_scores[page] = score;
      add(total, score);
    }
  }
  if (lane < kHeads) of_warp[lane][warp] = total;
  __syncthreads();
  for (uint32_t h = warp; h < group_heads; h += kWarps) {
    const LogSum of_head = warp_log_sum(first_part(of_warp[h], kWarps));
    if (lane == 0) parts[first_part_of(own_blocks, p.group, first_head + h) + block] = of_head;
  }
}

using ScoreKernel = void (*)(const StepParams*, const HeadState*, PageScoreParams, const float*, const uint4*,
                             Rope, float*, LogSum*);
static void score(const Launch& l, const PageScore& op, ScoreKernel of_four, ScoreKernel of_eight) {
  const PageScoreParams& p = op.p;
  const uint32_t heads_at_once = score_heads_at_once(p.group);
  const uint32_t passes = static_cast<uint32_t>(ceil_div(p.group, heads_at_once));
  const ScoreParts parts{reinterpret_cast<LogSum*>(l.scratch), l.heads + p.head_state + p.first_head,
                         std::max(1u, kBlocksEach * l.card.multiprocessors / (p.heads * passes))};
  const Rope rope{data<float2>(op.rope), p.rope.n_rot / 2};
  launch(l, heads_at_once == 4 ? of_four : of_eight, dim3(parts.each, p.heads, passes), kThreads, 0, l.step,
         parts.heads, p, data<float>(op.q), data<uint4>(op.bounds), rope, data<float>(op.scores), parts.sums);
  sum_score_parts(l, parts, p.heads, p.group, p.page, nullptr, data<float>(op.lse) + p.first_head * p.group);
}

void page_score(const Launch& l, const PageScore& op) {
  if (op.p.head_dim <= 64)
    score(l, op, page_score_kernel<8, 4>, page_score_kernel<8, kMostScoreHeads>);
  else if (op.p.head_dim <= 128)
    score(l, op, page_score_kernel<16, 4>, page_score_kernel<16, kMostScoreHeads>);
  else if (op.p.head_dim <= 256)
    score(l, op, page_score_kernel<32, 4>, page_score_kernel<32, kMostScoreHeads>);
  else
    score(l, op, wide_page_score_kernel<4>, wide_page_score_kernel<kMostScoreHeads>);
}

uint64_t page_score_scratch(const ModelShape& m, const SessionShape& s, const Card& card) {
  if (s.positions == 0) return 0;
  return score_parts_bytes(std::max(m.heads, kBlocksEach * card.multiprocessors));
}

}  // namespace thimble::cuda
