// token_score: each query head scores the middle entries of its KV head as if they were all n_local tokens
// back.
#include <algorithm>

#include "backends/cuda/kv_format.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/rope.cuh"
#include "backends/cuda/select/score_parts.cuh"

namespace thimble::cuda {

// The rows of a chunk are added in at most kMostSlices concurrent slices, of kSliceRows rows or more.
constexpr uint32_t kMostSlices = 16, kSliceRows = 32;
constexpr uint32_t kMeanThreads = 256;

// The rotary position of the first row's query. Keys stay unrotated, so their distance is n_local + row.
// Under kRopeOriginal they are cached rotated; the query is then rotated to its own position, and the scores
// are the true logits.
__device__ static uint32_t first_position(const StepParams& s, const RopeParams& p) {
  return p.mode == kRopeList ? s.n_local : static_cast<uint32_t>(s.position);
}

// sums[slice][query head][head_dim] = the slice's rotated rows, added in order. Grid: (query head, slice).
// Threads: (head_dim, as many rows as fit); each first adds up its own rows.
static __global__ void sum_queries_kernel(const StepParams* step, const HeadState* heads, TokenScoreParams p,
                                          const float* q, const GateState* gate, Rope rope, float* sums) {
  begin_kernel();
  if (scored_units(*step, heads[blockIdx.x / p.group], 1) == 0 || selection_cached(gate)) return;
  static_assert(kMostHeadDim >= kMeanThreads);
  __shared__ float own_sums[kMostHeadDim];  // [blockDim.y][head_dim]
  const uint32_t rows = step->n_rows, slice_rows = (rows + gridDim.y - 1) / gridDim.y, c = threadIdx.x;
  const uint32_t first = blockIdx.y * slice_rows, end = min(first + slice_rows, rows);
  const float* own_q = q + (p.first_head * p.group + blockIdx.x) * p.head_dim;
  const uint32_t position = first_position(*step, p.rope);
  float sum = 0;
#pragma unroll 4
  for (uint32_t row = first + threadIdx.y; row < end; row += blockDim.y)
    sum += rotated_channel(own_q + uint64_t(row) * p.row_stride, c, position + row, rope, p.rope.pairing);
  own_sums[threadIdx.y * p.head_dim + c] = sum;
  __syncthreads();
  if (threadIdx.y != 0) return;
  for (uint32_t y = 1; y < blockDim.y; ++y) sum += own_sums[y * p.head_dim + c];
  sums[(uint64_t(blockIdx.y) * gridDim.x + blockIdx.x) * p.head_dim + c] = sum;
}

// A warp multiplies 16 keys at a time with its queries on tensor cores, in f16. A query is the sum of
// two f16 vectors, which are adjacent among the product's 8 columns: four heads, two columns each. Channels
// may be combined in any order, so a lane loads whole chunks of 8 of a row: t, t + 4, ... with t = lane % 4;
// its queries' channels are in the same order. A lane copies only the chunks that it reads itself, so no lane
// waits for another.
constexpr uint32_t kTileKeys = 16;

// kChunks per lane: head_dim is at most 32 * kChunks. If shared memory holds 16 warps, 128 KiB of keys are in
// flight at 128 channels; a multiprocessor of an H200 needs about 40. With 12 warps, top_k's blocks would fit
// on the same multiprocessors, but the attention after them would take 12 us instead of 6, for unknown
// reasons.
// Rows of 576 channels take 36 KiB per warp with two stages, of which every card has space for two warps.
template <uint32_t kChunks>
constexpr uint32_t kMostWarps = kChunks <= 4   ? 16
                                : kChunks <= 8 ? 8
                                               : 4;
template <uint32_t kChunks>
constexpr uint32_t kStages = kChunks <= 8 ? 3 : 2;
template <uint32_t kChunks>
constexpr uint32_t kWarpBytes = kStages<kChunks> * 2 * kChunks* kWarp * sizeof(uint4);

// Channel c of a query, scaled, from a single row or from the sums of slices.
struct Queries {
  const float *q, *sums;  // sums: [slices][query heads][head_dim], or null
  uint32_t slices;

  __device__ float channel(const StepParams& s, const TokenScoreParams& p, const Rope& rope, uint32_t query,
                           uint32_t c) const {
    float x = 0;
    if (sums)
      for (uint32_t slice = 0; slice < slices; ++slice)
        x += sums[(uint64_t(slice) * p.heads * p.group + query) * p.head_dim + c];
    else
      x = rotated_channel(q + (p.first_head * p.group + query) * p.head_dim, c, first_position(s, p.rope),
                          rope, p.rope.pairing);
    return x * (p.scale / static_cast<float>(s.n_rows));
  }
};

// Converts a query of 32 * kChunks channels to two f16 vectors, high + low = x / unit, and returns the unit:
// a power of two that puts the largest channel in [2^14, 2^15). A warp calls this.
template <uint32_t kChunks>
__device__ static float split_query(const float* query, __half* high, __half* low) {
  const uint32_t lane = threadIdx.x % kWarp;
  float x[kChunks], most = 0;
#pragma unroll
  for (uint32_t i = 0; i < kChunks; ++i) {
    x[i] = query[i * kWarp + lane];
    most = fmaxf(most, fabsf(x[i]));
  }
  const int exponent = static_cast<int>(__float_as_uint(warp_max(most)) >> 23) - 127,
            shift = min(14 - exponent, 126);
  const float scale = __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
#pragma unroll
  for (uint32_t i = 0; i < kChunks; ++i) {
    const float scaled = x[i] * scale;
    const __half top = __float2half_rn(scaled);
    high[i * kWarp + lane] = top;
    low[i * kWarp + lane] = __float2half_rn(scaled - __half2float(top));
  }
  return __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);
}

// The part of a block's shared memory that is not the ring.
template <uint32_t kChunks, uint32_t kHeads>
struct Rest {
  float units[kHeads];
  LogSum of_warp[kHeads][kMostWarps<kChunks>];
};

// Grid: (block among those of a KV head, pass over its group). Warp w of a head's block b processes tiles w *
// blocks + b, and so on, of 16 keys, so that blocks share the last round. kHeads: 4 or 8 query heads use the
// same keys. `heads`: those of the op. `parts`: the blocks' contributions to a head's log-sum-exp.
template <typename Format, uint32_t kChunks, uint32_t kHeads>
static __global__ void __launch_bounds__(kMostWarps<kChunks>* kWarp, 1)
    token_score_kernel(const StepParams* step, const HeadState* heads_table, TokenScoreParams p,
                       Queries queries, const typename Format::Unit* k, const GateState* gate, Rope rope,
                       float* all_scores, LogSum* parts, bool keys_stay) {
  release_successor();
  constexpr uint32_t kFours = kHeads / 4, kStages = cuda::kStages<kChunks>;
  extern __shared__ uint4 ring[];  // [kStages][warps][2 * kChunks][lanes], then Rest
  const uint32_t stage_chunks = blockDim.x * 2 * kChunks;
  auto& [units, of_warp] = *reinterpret_cast<Rest<kChunks, kHeads>*>(ring + kStages * stage_chunks);
  const StepParams s = *step;
  const bool was_cached = selection_cached(gate);  // whether the previous token reused its selection
  const HeadBlocks own_blocks = blocks_around(ScoredHeads{s, heads_table, 1});
  const uint32_t n = own_blocks.work;
  if (n == 0) return await_predecessor();
  const uint32_t warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t t = lane % 4, row = lane / 4;
  const uint32_t local_head = own_blocks.head, first_head = blockIdx.z * kHeads;
  // Heads of the group in this pass; the others up to kHeads are zeros
  const uint32_t heads = min(kHeads, p.group - first_head);
  const uint32_t first_query = local_head * p.group + first_head;
  const uint32_t begin = s.n_init, splits = own_blocks.count, split = block_of_heads() - own_blocks.first;
  const uint32_t stride = splits * warps * kTileKeys;

  using Unit = typename Format::Unit;
  const uint32_t row_units = Format::row_units(p.head_dim);
  const Unit* const own_keys =
      k + (uint64_t(heads_table[local_head].first) + begin) * row_units + t * Format::kChunkUnits;
  uint4* const own_ring = ring + warp * 2 * kChunks * kWarp + lane;
  // Chunk j of row `row`, and of row `row` + 8, of a tile.
  const auto slot = [&](uint32_t stage, uint32_t half, uint32_t j) -> uint4& {
    return own_ring[stage * stage_chunks + (half * kChunks + j) * kWarp];
  };
  const auto fetch_half = [&](uint32_t stage, uint32_t half, uint32_t tile) {
    const uint32_t at = tile + row + 8 * half;
    const Unit* const from = own_keys + uint64_t(at < n ? at : 0) * row_units;
#pragma unroll
    for (uint32_t j = 0; j < kChunks; ++j) {
      const bool valid = at < n && (t + 4 * j) * 8 < p.head_dim;
      if constexpr (Format::kPlain)
        copy_async<16>(&slot(stage, half, j), from + (valid ? j * 4 * Format::kChunkUnits : 0), valid);
      else
        slot(stage, half, j) = valid ? Format::load_halves(from, p.head_dim, t + 4 * j) : uint4{};
    }
  };
  const auto fetch = [&](uint32_t stage, uint32_t tile) {
    fetch_half(stage, 0, tile);
    fetch_half(stage, 1, tile);
    commit_copies();
  };
  uint32_t first = (warp * splits + split) * kTileKeys;
  // If the previous token had to select, this one most likely has to as well. Its keys exist already except
  // its own, which is never in the middle if there is a local window. Only half a tile is requested at a
  // time: after a full one the gate would get its query 3 us later.
  const bool ahead = keys_stay && s.n_rows == 1 && s.n_local > 0 && s.theta > -1 && !was_cached;
  if (ahead)
#pragma unroll 1
    for (uint32_t half = 0; half < 2 * (kStages - 1); ++half) {
      fetch_half(half / 2, half % 2, first + half / 2 * stride);
      commit_copies();
      wait_copies<0>();
    }
  await_predecessor();
  if (selection_cached(gate)) return wait_copies<0>();
  if (!ahead)
#pragma unroll 1
    for (uint32_t stage = 0; stage < kStages - 1; ++stage) fetch(stage, first + stage * stride);

  // The queries use the last stage, which is still free: first whole, then split into [kHeads]{high, low}.
  constexpr uint32_t kWidth = kChunks * kWarp, kHalf = kWidth / 8;  // channels; chunks of 8
  static_assert(kHeads * (kWidth / 4 + 2 * kHalf) <= 2 * kWarp * 2 * kChunks,
                "the stage of two warps holds both");
  float* const whole = reinterpret_cast<float*>(ring + (kStages - 1) * stage_chunks);
  uint4* const halves = reinterpret_cast<uint4*>(whole + kHeads * kWidth);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < kHeads * kWidth; i += blockDim.x) {
    const uint32_t h = i / kWidth, c = i % kWidth;
    whole[i] = h < heads && c < p.head_dim ? queries.channel(s, p, rope, first_query + h, c) : 0;
  }
  __syncthreads();
  for (uint32_t h = warp; h < kHeads; h += warps) {
    __half* const high = reinterpret_cast<__half*>(halves + 2 * h * kHalf);
    const float unit = split_query<kChunks>(whole + h * kWidth, high, high + kWidth);
    if (lane == 0) units[h] = unit;
  }
  __syncthreads();
  uint4 query[kFours][kChunks];  // for column `row`
  float unit[kFours];            // for head t
  float* own_scores[kFours];
  LogSum total[kFours];  // of the lane's scores
#pragma unroll
  for (uint32_t four = 0; four < kFours; ++four) {
#pragma unroll
    for (uint32_t j = 0; j < kChunks; ++j) query[four][j] = halves[(four * 8 + row) * kHalf + t + 4 * j];
    unit[four] = units[four * 4 + t];
    const uint32_t own_query = p.first_head * p.group + first_query + four * 4 + t;
    own_scores[four] = all_scores + uint64_t(own_query) * p.score_capacity + begin;
    total[four] = kNoSum;
  }
  __syncthreads();

  uint32_t stage = 0;
#pragma unroll 1
  for (; first < n; first += stride) {
    fetch(stage == 0 ? kStages - 1 : stage - 1, first + (kStages - 1) * stride);
    wait_copies<kStages - 1>();
    float products[kFours][4] = {};  // high and low for row `row` and for row `row` + 8
#pragma unroll
    for (uint32_t j = 0; j < kChunks; ++j) {
      uint4 a = slot(stage, 0, j), b = slot(stage, 1, j);
      if constexpr (Format::kPlain) {
        a = Format::halves(a);
        b = Format::halves(b);
      }
#pragma unroll
      for (uint32_t four = 0; four < kFours; ++four) {
        multiply_f16(products[four], {a.x, b.x, a.y, b.y}, query[four][j].x, query[four][j].y);
        multiply_f16(products[four], {a.z, b.z, a.w, b.w}, query[four][j].z, query[four][j].w);
      }
    }
    stage = stage + 1 < kStages ? stage + 1 : 0;
#pragma unroll
    for (uint32_t four = 0; four < kFours; ++four)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t at = first + row + 8 * half;
        if (at >= n || four * 4 + t >= heads) continue;
        const float score = (products[four][2 * half] + products[four][2 * half + 1]) * unit[four];
        own_scores[four][at] = score;
        add(total[four], score);
      }
  }

  // Reduce over lanes of the same head, then over warps.
#pragma unroll
  for (uint32_t four = 0; four < kFours; ++four) {
    const LogSum sum = warp_log_sum(total[four], 4);
    if (lane < 4) of_warp[four * 4 + t][warp] = sum;
  }
  __syncthreads();
  for (uint32_t h = warp; h < heads; h += warps) {
    const LogSum sum = warp_log_sum(first_part(of_warp[h], warps));
    if (lane == 0) parts[first_part_of(own_blocks, p.group, first_head + h) + split] = sum;
  }
}

// Scratch: the parts of all blocks, then the sums of the slices.

ScoreParts score_parts(const Launch& l, const TokenScoreParams& p) {
  const uint32_t passes = static_cast<uint32_t>(ceil_div(p.group, score_heads_at_once(p.group)));
  return {reinterpret_cast<LogSum*>(l.scratch), l.heads + p.head_state + p.first_head,
          std::max(1u, l.card.multiprocessors / (p.heads * passes))};
}

template <typename Format, uint32_t kChunks, uint32_t kHeads>
static void score(const Launch& l, const TokenScore& op) {
  const TokenScoreParams& p = op.p;
  const uint32_t passes = static_cast<uint32_t>(ceil_div(p.group, kHeads)), queries = p.heads * p.group;
  const ScoreParts parts = score_parts(l, p);
  const Rope rope{data<float2>(op.rope), p.rope.n_rot / 2};
  const GateState* gate = data<GateState>(op.gate);
  const uint32_t slices = std::min<uint32_t>(kMostSlices, ceil_div(l.max_rows, kSliceRows));
  float* sums = nullptr;
  if (l.max_rows > 1) {
    sums = reinterpret_cast<float*>(l.scratch + score_parts_bytes(uint64_t(parts.each) * p.heads * passes));
    launch(l, sum_queries_kernel, dim3(queries, slices),
           dim3(p.head_dim, std::max(1u, kMeanThreads / p.head_dim)), 0, l.step, parts.heads, p,
           data<float>(op.q), gate, rope, sums);
  }
  // A multiple of 4 if possible, because a multiprocessor has four schedulers.
  constexpr uint32_t kRestBytes = sizeof(Rest<kChunks, kHeads>);
  const uint32_t fit = (l.card.shared_bytes - kRestBytes) / kWarpBytes<kChunks>;
  const uint32_t warps = std::min(kMostWarps<kChunks>, fit < 4 ? fit : fit / 4 * 4);
  launch(l, token_score_kernel<Format, kChunks, kHeads>, dim3(parts.each, p.heads, passes), warps * kWarp,
         warps * kWarpBytes<kChunks> + kRestBytes, l.step, parts.heads, p,
         Queries{data<float>(op.q), sums, slices}, data<typename Format::Unit>(op.k.values), gate, rope,
         data<float>(op.scores), parts.sums, keys_stay(l, op.k.values));
}

template <typename Format, uint32_t kChunks>
static void score(const Launch& l, const TokenScore& op) {
  if (score_heads_at_once(op.p.group) == 4)
    score<Format, kChunks, 4>(l, op);
  else
    score<Format, kChunks, 8>(l, op);
}

void token_score_before_vote(const Launch& l, const TokenScore& op) {
  with_format(op.k.type, [&]<typename Format>(Format) {
    if (op.p.head_dim <= 64)
      score<Format, 2>(l, op);
    else if (op.p.head_dim <= 128)
      score<Format, 4>(l, op);
    else if (op.p.head_dim <= 256)
      score<Format, 8>(l, op);
    else
      score<Format, kMostHeadDim / kWarp>(l, op);
  });
}

void token_score(const Launch& l, const TokenScore& op) {
  const TokenScoreParams& p = op.p;
  token_score_before_vote(l, op);
  sum_score_parts(l, score_parts(l, p), p.heads, p.group, 1, data<GateState>(op.gate),
                  data<float>(op.lse) + p.first_head * p.group);
}

uint64_t token_score_scratch(const ModelShape& m, const SessionShape& s, const Card& card) {
  if (s.positions == 0) return 0;
  return score_parts_bytes(std::max(m.heads, card.multiprocessors)) +
         uint64_t(kMostSlices) * m.heads * m.head_dim * sizeof(float);
}

}  // namespace thimble::cuda
