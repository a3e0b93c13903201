// Shared by the kernels of attend_view: which keys a query sees, how queries are loaded, and the running
// softmax that is carried across tiles, parts and passes. Device side.
//
// A query vector is one query head of one row. Those of a KV head are numbered row * group + query head of
// the group. All of them read the same keys and values, so a tile of 128 vectors is full even if a step has
// only 32 rows.
#pragma once

#include "backends/cuda/head_blocks.cuh"
#include "backends/cuda/rope.cuh"
#include "backends/cuda/soft_cap.cuh"

namespace thimble::cuda {

// The operands of a launch. A block attends with one tile of a KV head's query vectors to one part of the
// keys of this pass. If a step has too few vectors to fill the card, or KV heads have unequal numbers of
// keys, there are several parts. The first part writes its result to y and ml, as if the other parts were
// later passes, and combine_parts() merges them all.
struct ViewAttention {
  AttentionParams p;
  const HeadState* heads;  // from KV head 0 of the layer on
  Rope rope;
  const float* q;
  const __half *k, *v;
  const uint32_t* lists;
  const float* sinks;  // one per query head, or null
  float* y;
  float2* ml;
  uint32_t each;  // parts per KV head if all heads have the same number of keys
  // otherwise: parts in addition to the first one of each head, divided by the heads' keys
  uint32_t spare;
  uint32_t tiles;        // tiles that max_vectors make
  uint32_t max_vectors;  // per KV head
  // [parts except the first of each head][max_vectors][value_cols], not divided by the sum
  float* part_out;
  float2* part_ml;            // [parts except the first of each head][max_vectors]{maximum, sum}
  const uint32_t* row_index;  // list index of each row's own entry; null: the rows' entries are the last ones
  uint32_t value_cols;        // channels of a value
  // A lifted view: all heads attend to the entries of head 0, and queries rotate from this channel on.
  bool lifted = false;
  uint32_t rope_first = 0;
};

// The kernel for Hopper (attention_view_wgmma.cu): whether it supports an op, and its launch. Its blocks have
// kWgmmaVectors query vectors, its tiles wgmma_keys() keys: with 256 channels, a warpgroup's outputs take
// half of its registers.
inline constexpr uint32_t kWgmmaVectors = 128;
constexpr uint32_t wgmma_keys(uint32_t head_dim) { return head_dim == 256 ? 64 : 128; }
bool wgmma_attends(const Launch&, const ViewAttention&);
void attend_wgmma(const Launch&, const ViewAttention&, uint32_t blocks);

// The kernel for values that are channels of the keys (attention_view_latent.cu): its tiles, and its launch.
// head_dim of the operands is the width of a value, and p is that of the op.
struct LatentTiling {
  uint32_t vectors, keys;
};
LatentTiling latent_tiling(const Launch&, const AttentionParams& p);
void attend_latent(const Launch&, const ViewAttention&, const AttentionParams& p, uint32_t blocks);

// One KV head in this pass. kIndexed: rows state the list index of their own entries, and there is no window.
template <bool kIndexed = false>
struct ViewPass {
  uint32_t n_rows, first_entry;
  uint32_t first_index;  // list index of row 0's own entry, unless kIndexed
  uint32_t keys;         // valid rows of the view; 0 if an earlier pass was the last
  bool first, last;

  __device__ ViewPass(const StepParams& step, const ViewAttention& o, uint32_t head)
      : n_rows(step.n_rows), first_entry(o.p.first_entry) {
    const uint32_t run = o.lifted ? 0 : head;
    const uint32_t count =
        entry_list(o.lists, run, o.p.list_capacity, step_entries(step, o.heads[run])).count;
    first_index = count - n_rows;
    keys = count > first_entry ? min(count - first_entry, o.p.view_capacity) : 0;
    first = first_entry == 0;
    last = first_entry + o.p.view_capacity >= count;
    window = o.p.window;
    row_index = o.row_index;
  }
  // The list index of a row's own entry; any value for rows after the last.
  __device__ uint32_t index_of(uint32_t row) const {
    if constexpr (kIndexed)
      return row_index[min(row, n_rows - 1)];
    else
      return first_index + row;
  }
  // The step's row sees view rows [hidden, visible).
  __device__ uint32_t visible(uint32_t row) const {
    const uint32_t seen = index_of(row) + 1;
    return seen > first_entry ? min(keys, seen - first_entry) : 0;
  }
  __device__ uint32_t hidden(uint32_t row) const {
    if constexpr (kIndexed) return 0;
    const uint32_t seen = first_index + row + 1;
    if (window == 0 || seen <= first_entry || seen - first_entry <= window) return 0;
    return min(keys, seen - first_entry - window);
  }

 private:
  uint32_t window;
  const uint32_t* row_index;
};

// How many keys of this pass the step's first row sees of a KV head, counted from o.p.first_head on; the
// total number of keys if rows are indexed.
struct KeysOfHead {
  const ViewAttention& o;
  const StepParams& step;
  __device__ uint32_t operator()(uint32_t head) const {
    const ViewPass<> pass(step, o, o.p.first_head + head);
    return pass.keys - pass.hidden(0);
  }
};

// One part of a KV head's keys.
struct ViewPart {
  uint32_t head;  // counted from o.p.first_head on; o.p.heads: a surplus part
  uint32_t index, count;
  uint32_t place;  // index of its result in part_out, unless it is the head's first part
};

// The parts of all heads, numbered in the order in which they start. If heads are unequal, those with more
// keys than average come first, because otherwise one of their parts might start when all others have
// finished.
class ViewParts {
 public:
  __device__ ViewParts(const ViewAttention& o, const StepParams& step)
      : keys_{o, step}, heads_(o.p.heads), each_(o.each), spare_(o.spare) {
    uint32_t of_each;
    equal_ = equal_work(heads_, keys_, of_each);
    if (equal_) return;
    const uint32_t lane = threadIdx.x % kWarp;
    head_ = lane, keys_of_head_ = lane < heads_ ? keys_(lane) : 0;
    if (heads_ > kWarp) return;
    const uint32_t longer =
                       __ballot_sync(~0u, keys_of_head_ * heads_ > __reduce_add_sync(~0u, keys_of_head_)),
                   before = (1u << lane) - 1;
    const uint32_t place =
        longer >> lane & 1 ? __popc(longer & before) : __popc(longer) + __popc(~longer & before);
    for (uint32_t head = 0; head < heads_; ++head)
      if (__shfl_sync(~0u, place, head) == lane) head_ = head;
    keys_of_head_ = __shfl_sync(~0u, keys_of_head_, head_);
  }
  __device__ ViewPart operator[](uint32_t number) const {
    const uint32_t head = min(number / each_, heads_);
    const HeadBlocks own = equal_ ? HeadBlocks{head, head * each_, each_, 0}
                                  : find([&](uint32_t, uint32_t end) { return number < end; });
    return part(own, number - own.first);
  }
  // The first part of head number `i` in this order.
  __device__ ViewPart first_of(uint32_t i) const {
    return part(
        equal_ ? HeadBlocks{i, i * each_, each_, 0} : find([&](uint32_t h, uint32_t) { return h == i; }), 0);
  }

 private:
  __device__ uint32_t head_at(uint32_t i) const {
    return equal_ || heads_ > kWarp ? i : __shfl_sync(~0u, head_, i);
  }
  template <typename Is>
  __device__ HeadBlocks find(const Is& is) const {
    // Each lane asks about its own head. The result's `work` is not used in calls in which all lanes ask
    // about the same head.
    const auto keys = [&](uint32_t i) { return i == threadIdx.x % kWarp ? keys_of_head_ : keys_(i); };
    return find_head_blocks(heads_ + spare_, heads_, keys, is);
  }
  __device__ ViewPart part(const HeadBlocks& own, uint32_t index) const {
    return {own.head < heads_ ? head_at(own.head) : heads_, index, own.count,
            own.first - own.head + index - 1};
  }

  KeysOfHead keys_;
  uint32_t heads_, each_, spare_;
  // If heads are unequal: the lane's head in this order, and its keys. With more heads than lanes the order
  // is unchanged.
  uint32_t head_, keys_of_head_;
  bool equal_;
};

// The work of a block: kVectors query vectors of one KV head from `first_vector` on, with the tiles of kKeys
// keys in one part.
struct ViewBlock {
  uint32_t head, first_vector, first_tile, end_tile;
  uint32_t all_from, all_see;  // every vector of the block sees these view rows; other tiles need a mask
  ViewPart part;
  bool empty;  // nothing to compute and no result to pass on
};
template <int kVectors, int kKeys, bool kIndexed = false>
__device__ ViewBlock view_block(const ViewAttention& o, const StepParams& step) {
  // Blocks with the most keys start first, so that none of them runs alone at the end. Surplus blocks, which
  // exist if heads are equal, start last.
  const uint32_t equal = o.p.heads * o.each, spare = max(o.p.heads + o.spare, equal) - equal;
  const bool among_equal = blockIdx.x < equal * o.tiles;
  const uint32_t others = among_equal ? blockIdx.x : blockIdx.x - equal * o.tiles,
                 from_end = others / (among_equal ? equal : spare),
                 number = among_equal ? others % equal : equal + others % spare;
  ViewBlock b{};
  const uint32_t vectors = step.n_rows * o.p.group, tiles_of_vectors = (vectors + kVectors - 1) / kVectors;
  b.part = ViewParts(o, step)[number];
  // All lanes have the same value. The reduction moves it to a uniform register, which makes the loop over
  // tiles 2 % faster.
  b.part.head = __reduce_max_sync(~0u, b.part.head);
  b.part.index = __reduce_max_sync(~0u, b.part.index);
  b.part.count = __reduce_max_sync(~0u, b.part.count);
  b.empty = from_end >= tiles_of_vectors || b.part.head == o.p.heads;
  if (b.empty) return b;
  b.head = o.p.first_head + b.part.head;
  const ViewPass<kIndexed> pass(step, o, b.head);
  b.empty = pass.keys == 0;
  if (b.empty) return b;
  b.first_vector = (tiles_of_vectors - 1 - from_end) * kVectors;
  const uint32_t last_vector = min(b.first_vector + kVectors, vectors) - 1;
  const uint32_t first_row = b.first_vector / o.p.group, last_row = last_vector / o.p.group;
  const uint32_t before = pass.hidden(first_row) / kKeys,
                 tiles = (pass.visible(last_row) + kKeys - 1) / kKeys - before;
  b.first_tile = before + tiles * b.part.index / b.part.count;
  b.end_tile = before + tiles * (b.part.index + 1) / b.part.count;
  b.all_from = pass.hidden(last_row);
  b.all_see = pass.visible(first_row);
  return b;
}
// Whether some vector of the block does not see all keys of a tile.
template <int kKeys>
__device__ bool needs_mask(const ViewBlock& b, uint32_t tile) {
  return (tile + 1) * kKeys > b.all_see || tile * kKeys < b.all_from;
}

inline constexpr float kLog2E = 1.44269504f;  // queries are scaled by it, so that the softmax works in base 2

// Rotates, scales and rounds kVectors query vectors. store(vector, channel, value) is called for each of kDim
// channels, with zeros for channels from head_dim on and for vectors after the last row.
template <int kDim, int kVectors, int kThreads, bool kIndexed, typename Store>
__device__ void load_queries(const ViewAttention& o, const StepParams& step, const ViewPass<kIndexed>& pass,
                             uint32_t head, uint32_t first_vector, uint32_t thread, Store store) {
  const float scale = o.p.scale * kLog2E;
  const uint32_t from = o.p.rope.mode == kRopeList ? pass.first_index : static_cast<uint32_t>(step.position);
  const uint32_t last_row = pass.n_rows - 1, last_channel = o.p.head_dim - 1;
  // A warp processes whole vectors, so that it divides by the group once per vector. Loads are unconditional,
  // so that those of several vectors overlap.
#pragma unroll 4
  for (uint32_t vector = thread / kWarp; vector < kVectors; vector += kThreads / kWarp) {
    const uint32_t row = (first_vector + vector) / o.p.group, of_group = (first_vector + vector) % o.p.group;
    const bool there = row < pass.n_rows;
    const uint32_t loaded = min(row, last_row), position = kIndexed ? pass.index_of(loaded) : from + loaded;
    const float* q = o.q + uint64_t(loaded) * o.p.row_stride + (head * o.p.group + of_group) * o.p.head_dim;
#pragma unroll
    for (uint32_t pair = thread % kWarp; pair < kDim / 2; pair += kWarp) {
      const bool rotates = pair < o.rope.pairs;
      // If the last channels of a query rotate, the others are its first ones.
      const uint32_t other = o.rope_first && pair < o.p.head_dim / 2 ? pair - o.rope.pairs : pair;
      const uint32_t c0 = rotates ? o.rope_first + first_of_pair(pair, o.p.rope.pairing) : 2 * other;
      const uint32_t c1 =
          rotates ? o.rope_first + second_of_pair(pair, o.p.rope.pairing, o.rope.pairs) : 2 * other + 1;
      const float x0 = q[min(c0, last_channel)] * scale, y0 = q[min(c1, last_channel)] * scale;
      float2 angle{1, 0};
      if (o.rope.pairs) angle = o.rope.angle(position, min(pair, o.rope.pairs - 1));
      if (!rotates) angle = {1, 0};
      store(vector, c0, __float2half_rn(there && c0 <= last_channel ? x0 * angle.x - y0 * angle.y : 0));
      store(vector, c1, __float2half_rn(there && c1 <= last_channel ? x0 * angle.y + y0 * angle.x : 0));
    }
  }
}

// 2^x with an error of at most 2 units in the last place; 0 for -infinity.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline uint32_t pack_halves(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(h);
}

// The running softmax of a warp's 16 vectors, in the layout of tensor core results: lane i holds vectors i /
// 4 and i / 4 + 8, and of each 8 channels or keys number 2 * (i % 4) and the next.
template <int kDim>
struct RunningSoftmax {
  float out[kDim / 8][4];
  float peak[2], sum[2];  // sum: only this lane's share

  __device__ static uint32_t vector_of_lane(uint32_t first_vector, int half) {
    return first_vector + threadIdx.x % kWarp / 4 + 8 * half;
  }
  __device__ static uint32_t column_of_lane() { return 2 * (threadIdx.x % 4); }

  // Starts empty, or from the result of the previous pass.
  template <typename Pass>
  __device__ void begin(const ViewAttention& o, const Pass& pass, const ViewBlock& b, uint32_t first_vector) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      peak[half] = -kInfinity;
      sum[half] = 0;
      const uint32_t vector = vector_of_lane(first_vector, half), row = vector / o.p.group;
      if (b.part.index > 0 || row >= pass.n_rows) continue;
      const uint32_t query_head = b.head * o.p.group + vector % o.p.group;
      if (pass.first) {
        if (!o.sinks) continue;
        peak[half] = o.sinks[query_head] * kLog2E;
        if (threadIdx.x % 4 == 0) sum[half] = 1;
        continue;
      }
      const float2 ml = o.ml[uint64_t(row) * (o.p.first_head + o.p.heads) * o.p.group + query_head];
      peak[half] = ml.x;
      if (threadIdx.x % 4 == 0) sum[half] = ml.y;
      const float* y = o.y + uint64_t(row) * o.p.y_stride + query_head * o.value_cols;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t c = 8 * n + column_of_lane() + i;
          if (c < o.value_cols) out[n][2 * half + i] = y[c];
        }
    }
  }

  template <int kTiles>
  __device__ static void cap(const ViewAttention& o, float (&scores)[kTiles][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = soft_cap(scores[n][i], o.p.cap * kLog2E);
  }

  // Masks the keys of a tile that the vectors do not see. The tile starts at view row first_key.
  template <typename Pass, int kTiles>
  __device__ void mask(const ViewAttention& o, const Pass& pass, uint32_t first_vector, uint32_t first_key,
                       float (&scores)[kTiles][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = vector_of_lane(first_vector, half) / o.p.group, hidden = pass.hidden(row),
                     seen = pass.visible(row) - min(hidden, pass.visible(row));
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (first_key + 8 * n + column_of_lane() + i - hidden >= seen) scores[n][2 * half + i] = -kInfinity;
    }
  }

  // Turns a tile's scores into weights. Returns the factor for `out` before the weights' values are added to
  // it.
  template <int kTiles>
  __device__ float2 soften(float (&scores)[kTiles][4]) {
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = peak[half];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float base = top == -kInfinity ? 0 : top;  // no key seen yet
      scale[half] = fast_exp2(peak[half] - base);
      peak[half] = top;
      sum[half] *= scale[half];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& s = scores[n][2 * half + i];
          s = fast_exp2(s - base);
          sum[half] += s;
        }
    }
    return {scale[0], scale[1]};
  }
  // With thousands of keys a new maximum is rare, so most tiles skip the multiplication.
  __device__ void rescale(float2 scale) {
    if (!__any_sync(~0u, scale.x != 1 || scale.y != 1)) return;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      out[n][0] *= scale.x;
      out[n][1] *= scale.x;
      out[n][2] *= scale.y;
      out[n][3] *= scale.y;
    }
  }

  // Writes the result, or the state from which the next pass or combine_parts() continues. Without ml, it
  // writes no maxima and sums.
  template <typename Pass>
  __device__ void end(const ViewAttention& o, const Pass& pass, const ViewBlock& b, uint32_t first_vector) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      const uint32_t vector = vector_of_lane(first_vector, half), row = vector / o.p.group;
      if (row >= pass.n_rows) continue;
      const uint32_t query_head = b.head * o.p.group + vector % o.p.group;
      float* y = o.y + uint64_t(row) * o.p.y_stride + query_head * o.value_cols;
      float2* ml = o.ml + uint64_t(row) * (o.p.first_head + o.p.heads) * o.p.group + query_head;
      if (b.part.index > 0) {
        const uint64_t at = uint64_t(b.part.place) * o.max_vectors + vector;
        y = o.part_out + at * o.value_cols;
        ml = o.part_ml + at;
      }
      const bool divide = pass.last && b.part.count == 1;
      const float factor = divide ? 1 / sum[half] : 1;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t c = 8 * n + column_of_lane() + i;
          if (c < o.value_cols) y[c] = out[n][2 * half + i] * factor;
        }
      if (o.ml && !divide && threadIdx.x % 4 == 0) *ml = {peak[half], sum[half]};
    }
  }
};

}  // namespace thimble::cuda
