// attend_view: flash attention of a step's rows to the view, with the tensor core instructions of sm_80.
#include <algorithm>

#include "backends/cuda/attention/attention.h"
#include "backends/cuda/attention/attention_view.cuh"
#include "backends/cuda/mma.cuh"

namespace thimble::cuda {
namespace {

constexpr int kKeys = 64;  // keys per tile
constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr uint32_t kMostVectors = 128;  // query vectors per block

// The shape of a block for heads of up to kDim channels. A warp has as many rows of 16 query vectors as its
// registers can hold, because each fragment of keys or values is loaded once for all of them.
template <int kDim>
struct Tiling {
  static constexpr int kRows = kDim <= 128 ? 2 : 1;
  static constexpr int kVectors = kWarps * kRows * 16;
  static constexpr int kBlocks = kDim <= 128 ? 2 : 1;  // per multiprocessor
  // Stride in halves between rows in shared memory: an odd number of 16-byte units, so that eight rows are in
  // different banks.
  static constexpr int kStride = kDim + 8;
  static constexpr size_t kShared = (kVectors + 2 * kKeys) * kStride * sizeof(__half);
};
static_assert(Tiling<256>::kShared <= 99 << 10 && Tiling<128>::kVectors == kMostVectors);

// Starts loading a tile of keys or values. The tile has `rows` rows; zeros replace the other rows and
// channels from head_dim on.
template <int kDim, bool kWide>
__device__ void load_tile(__half* to, const __half* from, uint32_t rows, uint32_t head_dim) {
  constexpr int kStride = Tiling<kDim>::kStride, kStep = kWide ? 8 : 1, kUnits = kDim / kStep;
#pragma unroll(kWide ? 2 : 1)
  for (int i = threadIdx.x; i < kKeys * kUnits; i += kThreads) {
    const uint32_t row = i / kUnits, channel = i % kUnits * kStep;
    const bool valid = row < rows && channel < head_dim;
    const __half* source = from + uint64_t(row) * head_dim + channel;
    if constexpr (kWide)
      copy_async<16>(to + row * kStride + channel, source, valid);
    else
      to[row * kStride + channel] = valid ? *source : __half();
  }
  commit_copies();
}

template <int kDim, bool kWide, bool kCaps, bool kIndexed>
__global__ void __launch_bounds__(kThreads, Tiling<kDim>::kBlocks)
    attend_view_kernel(const StepParams* step, ViewAttention o) {
  using T = Tiling<kDim>;
  constexpr int kStride = T::kStride;
  extern __shared__ uint4 shared[];
  __half* const q = reinterpret_cast<__half*>(shared);
  __half* const k = q + T::kVectors * kStride;
  __half* const v = k + kKeys * kStride;
  begin_kernel();
  const ViewBlock b = view_block<T::kVectors, kKeys, kIndexed>(o, *step);
  if (b.empty) return;
  const ViewPass<kIndexed> pass(*step, o, b.head);
  const uint32_t head_dim = o.p.head_dim;
  const uint64_t own = uint64_t(b.head) * o.p.view_capacity * head_dim;
  const auto load = [&](__half* to, const __half* from, uint32_t tile) {
    load_tile<kDim, kWide>(to, from + own + uint64_t(tile) * kKeys * head_dim, pass.keys - tile * kKeys,
                           head_dim);
  };

  if (b.first_tile < b.end_tile) load(k, o.k, b.first_tile);
  load_queries<kDim, T::kVectors, kThreads>(
      o, *step, pass, b.head, b.first_vector, threadIdx.x,
      [&](uint32_t vector, uint32_t channel, __half x) { q[vector * kStride + channel] = x; });

  const uint32_t lane = threadIdx.x % kWarp, in_block = threadIdx.x / kWarp * 16 * T::kRows;
  const uint32_t first_vector = b.first_vector + in_block;
  RunningSoftmax<kDim> rows[T::kRows];
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) rows[r].begin(o, pass, b, first_vector + 16 * r);

  // Where a lane's row of each 8x8 matrix begins. Queries and values are loaded by (rows, rows + 8) x
  // (channels, channels + 8); keys, which are the columns of the product, the other way round.
  const __half* const q_lane = q + (in_block + lane % 16) * kStride + lane / 16 * 8;
  const __half* const k_lane = k + (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
  const __half* const v_lane = v + lane % 16 * kStride + lane / 16 * 8;

  for (uint32_t tile = b.first_tile; tile < b.end_tile; ++tile) {
    wait_copies<0>();
    __syncthreads();  // the keys have arrived, and the previous tile's values are no longer needed
    load(v, o.v, tile);

    float scores[T::kRows][kKeys / 8][4] = {};
#pragma unroll
    for (int c = 0; c < kDim; c += 16) {
      uint32_t a[T::kRows][4], keys[4];
#pragma unroll
      for (int r = 0; r < T::kRows; ++r) load_matrices(a[r], q_lane + 16 * r * kStride + c);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        load_matrices(keys, k_lane + 16 * n * kStride + c);
#pragma unroll
        for (int r = 0; r < T::kRows; ++r) {
          multiply_f16(scores[r][2 * n], a[r], keys[0], keys[1]);
          multiply_f16(scores[r][2 * n + 1], a[r], keys[2], keys[3]);
        }
      }
    }
    wait_copies<0>();
    __syncthreads();  // the values have arrived, and these keys are no longer needed
    if (tile + 1 < b.end_tile) load(k, o.k, tile + 1);

    uint32_t weights[T::kRows][kKeys / 16][4];
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      if constexpr (kCaps) rows[r].cap(o, scores[r]);
      if (needs_mask<kKeys>(b, tile)) rows[r].mask(o, pass, first_vector + 16 * r, tile * kKeys, scores[r]);
      rows[r].rescale(rows[r].soften(scores[r]));
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          weights[r][n][i] =
              pack_halves(scores[r][2 * n + i / 2][i % 2 * 2], scores[r][2 * n + i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
      for (int c = 0; c < kDim; c += 16) {
        uint32_t values[4];
        load_matrices_transposed(values, v_lane + 16 * n * kStride + c);
#pragma unroll
        for (int r = 0; r < T::kRows; ++r) {
          multiply_f16(rows[r].out[c / 8], weights[r][n], values[0], values[1]);
          multiply_f16(rows[r].out[c / 8 + 1], weights[r][n], values[2], values[3]);
        }
      }
  }
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) rows[r].end(o, pass, b, first_vector + 16 * r);
}

// Heads of 512 channels. The outputs of 16 query vectors do not fit a warp's registers, so a launch computes
// the half of their channels that begins at first_channel. Shared memory holds the queries and one half of a
// tile of keys or values. Only the second launch stores maxima and sums, which the first one still reads.
constexpr int kWideDim = 512, kHalfDim = kWideDim / 2, kWideVectors = kWarps * 16, kWideStride = kWideDim + 8;
constexpr size_t kWideShared =
    (kWideVectors * kWideStride + kKeys * Tiling<kHalfDim>::kStride) * sizeof(__half);
static_assert(kWideShared <= 99 << 10);

template <bool kCaps, bool kIndexed>
__global__ void __launch_bounds__(kThreads, 1)
    attend_view_wide_kernel(const StepParams* step, ViewAttention o, uint32_t first_channel) {
  constexpr int kStride = Tiling<kHalfDim>::kStride;
  extern __shared__ uint4 shared[];
  __half* const q = reinterpret_cast<__half*>(shared);
  __half* const half = q + kWideVectors * kWideStride;
  begin_kernel();
  const ViewBlock b = view_block<kWideVectors, kKeys, kIndexed>(o, *step);
  if (b.empty) return;
  const ViewPass<kIndexed> pass(*step, o, b.head);
  const uint64_t own = uint64_t(b.head) * o.p.view_capacity * kWideDim;
  const auto load = [&](const __half* from, uint32_t tile, uint32_t channel) {
    load_tile<kHalfDim, true>(half, from + own + uint64_t(tile) * kKeys * kWideDim + channel,
                              pass.keys - tile * kKeys, kWideDim);
  };
  const auto arrive = [] {
    wait_copies<0>();
    __syncthreads();
  };

  load_queries<kWideDim, kWideVectors, kThreads>(
      o, *step, pass, b.head, b.first_vector, threadIdx.x,
      [&](uint32_t vector, uint32_t channel, __half x) { q[vector * kWideStride + channel] = x; });
  const uint32_t lane = threadIdx.x % kWarp, in_block = threadIdx.x / kWarp * 16,
                 first_vector = b.first_vector + in_block;
  ViewAttention to = o;
  to.y += first_channel;
  to.part_out += first_channel;
  RunningSoftmax<kHalfDim> rows;
  rows.begin(to, pass, b, first_vector);

  // As in attend_view_kernel.
  const __half* const q_lane = q + (in_block + lane % 16) * kWideStride + lane / 16 * 8;
  const __half* const k_lane = half + (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
  const __half* const v_lane = half + lane % 16 * kStride + lane / 16 * 8;

  for (uint32_t tile = b.first_tile; tile < b.end_tile; ++tile) {
    float scores[kKeys / 8][4] = {};
    for (int channel = 0; channel < kWideDim; channel += kHalfDim) {
      load(o.k, tile, channel);
      arrive();
#pragma unroll
      for (int c = 0; c < kHalfDim; c += 16) {
        uint32_t a[4], keys[4];
        load_matrices(a, q_lane + channel + c);
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
          load_matrices(keys, k_lane + 16 * n * kStride + c);
          multiply_f16(scores[2 * n], a, keys[0], keys[1]);
          multiply_f16(scores[2 * n + 1], a, keys[2], keys[3]);
        }
      }
      __syncthreads();  // these keys are no longer needed
    }
    load(o.v, tile, first_channel);
    if constexpr (kCaps) rows.cap(o, scores);
    if (needs_mask<kKeys>(b, tile)) rows.mask(o, pass, first_vector, tile * kKeys, scores);
    rows.rescale(rows.soften(scores));
    uint32_t weights[kKeys / 16][4];
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights[n][i] = pack_halves(scores[2 * n + i / 2][i % 2 * 2], scores[2 * n + i / 2][i % 2 * 2 + 1]);
    arrive();
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
      for (int c = 0; c < kHalfDim; c += 16) {
        uint32_t values[4];
        load_matrices_transposed(values, v_lane + 16 * n * kStride + c);
        multiply_f16(rows.out[c / 8], weights[n], values[0], values[1]);
        multiply_f16(rows.out[c / 8 + 1], weights[n], values[2], values[3]);
      }
    __syncthreads();  // these values are no longer needed
  }
  if (first_channel == 0) to.ml = nullptr;
  rows.end(to, pass, b, first_vector);
}

constexpr uint32_t kCombiningWarps = 16;  // per block
constexpr uint32_t kManyParts = 8;        // of a head: from here on a block's warps divide them

// Merges the parts of a pass into one softmax. A warp merges those of one query vector after the other; or,
// if kDivides, a block does, and its warps divide the parts among them. blockIdx.y numbers the heads.
template <bool kDivides>
__global__ void __launch_bounds__(kCombiningWarps* kWarp)
    combine_parts_kernel(const StepParams* step, ViewAttention o) {
  constexpr int kMostChannels = kWideDim / kWarp;  // per lane
  constexpr uint32_t kTeams = kDivides ? 1 : kCombiningWarps, kMembers = kCombiningWarps / kTeams;
  begin_kernel();
  const ViewPart own = ViewParts(o, *step).first_of(blockIdx.y);
  const ViewPass<> pass(*step, o, o.p.first_head + own.head);
  if (own.count == 1 || pass.keys == 0) return;
  const uint32_t lane = threadIdx.x % kWarp, team = threadIdx.x / kWarp / kMembers,
                 member = threadIdx.x / kWarp % kMembers;
  for (uint32_t vector = blockIdx.x * kTeams + team; vector < pass.n_rows * o.p.group;
       vector += gridDim.x * kTeams) {
    const uint32_t row = vector / o.p.group,
                   query_head = (o.p.first_head + own.head) * o.p.group + vector % o.p.group;
    float* const y = o.y + uint64_t(row) * o.p.y_stride + query_head * o.value_cols;
    float2* const ml = o.ml + uint64_t(row) * (o.p.first_head + o.p.heads) * o.p.group + query_head;
    // The first part's result is in y and ml.
    const auto place_of = [&](uint32_t part) { return uint64_t(own.place + part) * o.max_vectors + vector; };
    const auto ml_of = [&](uint32_t part) { return part ? o.part_ml[place_of(part)] : *ml; };

    float peak = -kInfinity, sum = 0, out[kMostChannels] = {};
#pragma unroll 4
    for (uint32_t part = member; part < own.count; part += kMembers) peak = fmaxf(peak, ml_of(part).x);
    float base = peak == -kInfinity ? 0 : peak;  // -infinity: the row has not seen a key yet
#pragma unroll 4
    for (uint32_t part = member; part < own.count; part += kMembers) {
      const float* const from = part ? o.part_out + place_of(part) * o.value_cols : y;
      const float2 from_ml = ml_of(part);
      const float weight = fast_exp2(from_ml.x - base);
      sum += from_ml.y * weight;
#pragma unroll
      for (int i = 0; i < kMostChannels; ++i)
        if (lane + i * kWarp < o.value_cols) out[i] += from[lane + i * kWarp] * weight;
    }
    if constexpr (kDivides) {
      __shared__ float outs[kMembers][kWideDim];
      __shared__ float2 mls[kMembers];
#pragma unroll
      for (int i = 0; i < kMostChannels; ++i)
        if (lane + i * kWarp < o.value_cols) outs[member][lane + i * kWarp] = out[i];
      if (lane == 0) mls[member] = {peak, sum};
      __syncthreads();
      const float2 of_lane = lane < kMembers ? mls[lane] : float2{-kInfinity, 0};
      peak = warp_max(of_lane.x);
      base = peak == -kInfinity ? 0 : peak;
      const float weight = fast_exp2(of_lane.x - base);
      sum = warp_sum(of_lane.y * weight);
      const float factor = pass.last ? 1 / sum : 1;
      float all = 0;  // of this thread's channel
      for (uint32_t i = 0; i < kMembers; ++i)
        all += __shfl_sync(~0u, weight, i) * outs[i][min(threadIdx.x, o.value_cols - 1)];
      if (threadIdx.x < o.value_cols) y[threadIdx.x] = all * factor;
      __syncthreads();  // the next vector's sums replace these
    } else {
      const float factor = pass.last ? 1 / sum : 1;
#pragma unroll
      for (int i = 0; i < kMostChannels; ++i)
        if (lane + i * kWarp < o.value_cols) y[lane + i * kWarp] = out[i] * factor;
      __syncwarp();  // all lanes have read the previous values
    }
    if (!pass.last && lane == 0 && member == 0) *ml = {peak, sum};
  }
}

// Bytes that all parts together write for `vectors` query vectors: their outputs, then {maximum, sum}.
uint64_t part_out_bytes(uint64_t vectors, uint32_t head_dim) {
  return round_up(vectors * head_dim * sizeof(float), 256);
}

// Divides a pass into parts if its tiles of `vectors` query vectors would leave multiprocessors idle. Adds
// the kernel that attends in tiles of `keys` to the program: put(operands, blocks).
template <typename Put>
void attend_in_parts(const Launch& l, ViewAttention o, uint32_t vectors, uint32_t keys, Put put) {
  o.tiles = static_cast<uint32_t>(ceil_div(o.max_vectors, vectors));
  const uint32_t tiles_of_keys = static_cast<uint32_t>(ceil_div(o.p.view_capacity, keys));
  // The number of parts leaves multiprocessors for the blocks of short heads, which run at the same time.
  // Measured with 512 rows, one head of 16,384 entries and seven of 64: 68 us with 5 spare parts, 77 with all
  // 8, 94 with 3.
  const uint32_t most = l.card.multiprocessors / o.tiles;
  o.spare = std::min(std::max(most * 5 / 8, std::min(most, 2u)), o.p.heads * tiles_of_keys);
  if (o.spare < 2 || o.p.heads == 1) o.spare = 0;
  o.each = std::max(1u, std::min(l.card.multiprocessors / (o.p.heads * o.tiles), tiles_of_keys));
  o.part_out = reinterpret_cast<float*>(l.scratch);
  o.part_ml = reinterpret_cast<float2*>(
      l.scratch +
      part_out_bytes(uint64_t(std::max(o.spare, (o.each - 1) * o.p.heads)) * o.max_vectors, o.value_cols));
  put(o, o.tiles * std::max(o.p.heads + o.spare, o.p.heads * o.each));
  if (o.each == 1 && o.spare == 0) return;
  const bool divides = std::max(o.each, o.spare) >= kManyParts;
  const uint64_t teams = divides ? o.max_vectors : ceil_div(o.max_vectors, kCombiningWarps);
  const dim3 blocks(static_cast<uint32_t>(std::min<uint64_t>(teams, l.card.multiprocessors)), o.p.heads);
  launch(l, divides ? combine_parts_kernel<true> : combine_parts_kernel<false>, blocks,
         kCombiningWarps * kWarp, 0, l.step, o);
}

template <int kDim, bool kWide>
void attend(const Launch& l, const ViewAttention& operands) {
  using T = Tiling<kDim>;
  attend_in_parts(l, operands, T::kVectors, kKeys, [&](const ViewAttention& o, uint32_t blocks) {
    const auto put = [&](auto kernel) { launch(l, kernel, blocks, kThreads, T::kShared, l.step, o); };
    if (o.row_index)
      put(o.p.cap != 0 ? attend_view_kernel<kDim, kWide, true, true>
                       : attend_view_kernel<kDim, kWide, false, true>);
    else
      put(o.p.cap != 0 ? attend_view_kernel<kDim, kWide, true, false>
                       : attend_view_kernel<kDim, kWide, false, false>);
  });
}

void attend_wide(const Launch& l, const ViewAttention& operands) {
  attend_in_parts(l, operands, kWideVectors, kKeys, [&](const ViewAttention& o, uint32_t blocks) {
    const auto put = [&](auto kernel) {
      for (const uint32_t first_channel : {0u, uint32_t{kHalfDim}})
        launch(l, kernel, blocks, kThreads, kWideShared, l.step, o, first_channel);
    };
    if (o.row_index)
      put(o.p.cap != 0 ? attend_view_wide_kernel<true, true> : attend_view_wide_kernel<false, true>);
    else
      put(o.p.cap != 0 ? attend_view_wide_kernel<true, false> : attend_view_wide_kernel<false, false>);
  });
}

}  // namespace

uint64_t attend_view_scratch(const ModelShape& m, const SessionShape&, const Card& c) {
  const uint64_t most = uint64_t(c.multiprocessors) * kMostVectors;
  return part_out_bytes(most, m.head_dim) + most * sizeof(float2);
}

// Everything but the kernel works on values alone.
static void attend_latent_view(const Launch& l, ViewAttention o) {
  const AttentionParams p = o.p;
  const LatentTiling t = latent_tiling(l, p);
  o.p.head_dim = o.value_cols;
  attend_in_parts(l, o, t.vectors, t.keys, [&](const ViewAttention& in_parts, uint32_t blocks) {
    attend_latent(l, in_parts, p, blocks);
  });
}

void attend_view(const Launch& l, const Attention& op) {
  const uint32_t dh = op.p.head_dim;
  const ViewAttention o{.p = op.p,
                        .heads = l.heads + op.p.head_state,
                        .rope = {data<float2>(op.rope), op.p.rope.n_rot / 2},
                        .q = data<float>(op.q),
                        .k = data<__half>(op.k.values),
                        .v = data<__half>(op.v.values),
                        .lists = data<uint32_t>(op.list),
                        .sinks = data<float>(op.sinks),
                        .y = data<float>(op.y),
                        .ml = data<float2>(op.ml),
                        .each = 1,
                        .spare = 0,
                        .tiles = 0,
                        .max_vectors = l.max_rows * op.p.group,
                        .part_out = nullptr,
                        .part_ml = nullptr,
                        .row_index = data<uint32_t>(op.row_index),
                        .value_cols = op.value_cols(),
                        .lifted = op.lifted.value_dim != 0,
                        .rope_first = op.lifted.rope_first};
  if (!op.v) return attend_latent_view(l, o);
  const bool wide =
      dh % 8 == 0 && (reinterpret_cast<uintptr_t>(o.k) | reinterpret_cast<uintptr_t>(o.v)) % 16 == 0;
  if (wgmma_attends(l, o))
    attend_in_parts(l, o, kWgmmaVectors, wgmma_keys(dh), [&](const ViewAttention& in_parts, uint32_t blocks) {
      attend_wgmma(l, in_parts, blocks);
    });
  else if (dh == kWideDim)
    attend_wide(l, o);
  else if (!wide)
    attend<256, false>(l, o);
  else if (dh <= 64)
    attend<64, true>(l, o);
  else if (dh <= 80)
    attend<80, true>(l, o);
  else if (dh <= 96)
    attend<96, true>(l, o);
  else if (dh <= 128)
    attend<128, true>(l, o);
  else
    attend<256, true>(l, o);
}

}  // namespace thimble::cuda
