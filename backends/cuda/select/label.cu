// label: how much the marked rows attend to each cached entry. The queries of the marked rows are first
// rotated and gathered. For the log-sum-exps, a block then processes 32 of a KV head's query vectors and a
// part of the keys; for the labels, 64 keys and all vectors. Tensor cores multiply f16, so a query is the sum
// of two f16 vectors, which omits 2^-22 of it.
#include "backends/cuda/kv_format.cuh"
#include "backends/cuda/log_sum.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/rope.cuh"
#include "backends/cuda/soft_cap.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 128, kVectors = 32, kKeys = 64;
constexpr uint32_t kDepth = 16;  // channels per matrix instruction
// Groups of 8 keys per warp, which has 16 vectors and half of a block's keys
constexpr uint32_t kColumns = 4;
constexpr uint32_t kParts = 16;  // parts of the keys, for the log-sum-exps

// Byte offsets in the scratch. The vectors of a KV head are numbered marked row * group + query of the group.
struct Scratch {
  uint64_t queries;     // f16 [kv head][vector][2][width]: the query rounded to f16, and the remainder
  uint64_t parts;       // LogSum [kv head][vector][kParts]
  uint64_t lengths;     // float [marked row]: log |x|
  uint64_t rows;        // uint [marked row]
  uint64_t count, end;  // uint: the number of marked rows; the end of the scratch

  Scratch(uint32_t max_rows, uint32_t heads, uint32_t head_dim) {
    const uint64_t vectors = uint64_t(max_rows) * heads;
    queries = 0;
    parts = queries + vectors * 2 * round_up(head_dim, kDepth) * sizeof(__half);
    lengths = parts + vectors * kParts * sizeof(LogSum);
    rows = lengths + max_rows * sizeof(float);
    count = rows + max_rows * sizeof(uint32_t);
    end = count + sizeof(uint32_t);
  }
};

struct Labels {
  LabelParams p;
  const HeadState* heads;  // from KV head 0 of the layer on
  Rope rope;
  const float* q;
  const uint32_t* marked;
  const void *k, *chunk_k;
  const uint32_t* range;
  const float *x, *worth, *sinks;
  float *lse, *max_logit, *log_prob;
  uint32_t width;        // head_dim, rounded up to kDepth
  uint32_t max_vectors;  // per KV head
  __half* queries;
  LogSum* parts;
  float* lengths;
  uint32_t *rows, *count;
};

// Ranges of the pool's entries: the sinks, the labelled entries, and those after the text.
struct Range {
  uint32_t sinks, first, end, own;
  __device__ Range(const Labels& o, const HeadState& state) {
    own = min(o.range[3], state.n_entries);
    end = min(min(o.range[2], own), o.p.label_capacity);
    first = min(o.range[1], end);
    sinks = min(o.range[0], first);
  }
};

// ---- the marked rows ----

// Sums a value over all threads of a block; every thread gets the sum. Floats are added in the same order in
// every run.
template <typename T>
__device__ T block_sum(T x, T* of_warp) {
#pragma unroll
  for (uint32_t offset = kWarp / 2; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();
  T sum = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < kThreads / kWarp; ++warp) sum += of_warp[warp];
  return sum;
}

// One block per row: if the row is marked, computes its vectors' index, their channels, and its length.
__global__ void __launch_bounds__(kThreads) gather_marked(const StepParams* step, Labels o) {
  __shared__ uint32_t counts[kThreads / kWarp];
  __shared__ float sums[kThreads / kWarp];
  const StepParams s = begin_kernel(step);
  const uint32_t row = blockIdx.x;
  if (row >= s.n_rows) return;
  uint32_t before = 0;
  for (uint32_t r = threadIdx.x; r < row; r += kThreads) before += o.marked[r] != 0;
  before = block_sum(before, counts);
  const bool is_marked = o.marked[row] != 0;
  if (row == s.n_rows - 1 && threadIdx.x == 0) *o.count = before + is_marked;
  if (!is_marked) return;

  float squares = 0;
  if (o.x)
    for (uint32_t c = threadIdx.x; c < o.p.x_cols; c += kThreads) {
      const float x = o.x[uint64_t(row) * o.p.x_cols + c];
      squares += x * x;
    }
  squares = block_sum(squares, sums);
  if (threadIdx.x == 0) {
    o.rows[before] = row;
    o.lengths[before] = o.x ? 0.5f * logf(squares) : 0;
  }
  const uint32_t position = static_cast<uint32_t>(s.position) + row, queries = o.p.heads * o.p.group;
  for (uint32_t i = threadIdx.x; i < queries * o.width; i += kThreads) {
    const uint32_t query = i / o.width, c = i % o.width;
    const float* q = o.q + uint64_t(row) * o.p.row_stride + query * o.p.head_dim;
    const float z =
        c < o.p.head_dim ? rotated_channel(q, c, position, o.rope, o.p.rope.pairing) * o.p.scale : 0;
    const uint64_t vector =
        uint64_t(query / o.p.group) * o.max_vectors + before * o.p.group + query % o.p.group;
    __half* to = o.queries + vector * 2 * o.width + c;
    const __half high = __float2half_rn(z);
    to[0] = high;
    to[o.width] = __float2half_rn(z - __half2float(high));
  }
}

// ---- products with keys ----

// The operands of a block in shared memory: rows of halves, padded to avoid bank conflicts.
struct Tiles {
  __half *high, *low, *keys;  // [kVectors], [kVectors], [kKeys][stride]
  uint32_t width, stride;

  __device__ Tiles(__half* memory, uint32_t w) : width(w), stride(w + 8) {
    high = memory;
    low = high + kVectors * stride;
    keys = low + kVectors * stride;
  }
  static size_t bytes(uint32_t width) { return (2 * kVectors + kKeys) * (width + 8) * sizeof(__half); }

  // Loads vectors [first, first + kVectors) of `count`, with zeros after the last.
  __device__ void load_vectors(const __half* queries, uint32_t first, uint32_t count) const {
    const uint32_t pieces = width / 8;
    for (uint32_t i = threadIdx.x; i < 2 * kVectors * pieces; i += kThreads) {
      const uint32_t of = i / pieces, vector = of / 2, piece = i % pieces;
      const bool there = first + vector < count;
      copy_async<16>((of % 2 ? low : high) + vector * stride + 8 * piece,
                     queries + (uint64_t(there ? first + vector : 0) * 2 + of % 2) * width + 8 * piece,
                     there);
    }
  }
  // Loads n consecutive keys, with zeros after the last.
  template <typename Format>
  __device__ void load_keys(const typename Format::Unit* from, uint32_t n, uint32_t head_dim) const {
    const uint32_t pieces = width / 8, row_units = Format::row_units(head_dim);
    for (uint32_t i = threadIdx.x; i < kKeys * pieces; i += kThreads) {
      const uint32_t key = i / pieces, c = i % pieces * 8;
      const bool there = key < n && c < head_dim;
      __half* const to = keys + key * stride + c;
      const auto* chunk = there ? from + uint64_t(key) * row_units + c / 8 * Format::kChunkUnits : from;
      if constexpr (Format::kHasHalves)
        copy_async<16>(to, chunk, there);
      else if constexpr (Format::kPlain)
        *reinterpret_cast<uint4*>(to) =
            there ? Format::halves(*reinterpret_cast<const uint4*>(chunk)) : uint4{};
      else
        *reinterpret_cast<uint4*>(to) = there ? Format::load_halves(chunk, head_dim, c / 8) : uint4{};
    }
  }
};

// A warp's logits: for its vectors lane / 4 and lane / 4 + 8, and of each 8 keys number 2 * (lane % 4) and
// the next. Warps 0 and 1 have
// the first half of the keys, warps 2 and 3 the second; the warps of a pair have half of the vectors each.
struct Logits {
  float z[kColumns][4];

  __device__ static uint32_t vector(uint32_t half) {
    return threadIdx.x / kWarp % 2 * 16 + 8 * half + threadIdx.x % kWarp / 4;
  }
  __device__ static uint32_t key(uint32_t column, uint32_t i) {
    return threadIdx.x / (2 * kWarp) * (kKeys / 2) + 8 * column + 2 * (threadIdx.x % 4) + i;
  }

  __device__ Logits(const Tiles& t, float cap) {
#pragma unroll
    for (uint32_t n = 0; n < kColumns; ++n)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) z[n][i] = 0;
    const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const uint32_t in_vectors = (warp % 2 * 16 + lane % 16) * t.stride + lane / 16 * 8;
    const uint32_t in_keys =
        (warp / 2 * (kKeys / 2) + lane % 8 + lane / 16 * 8) * t.stride + lane / 8 % 2 * 8;
    for (uint32_t c = 0; c < t.width; c += kDepth) {
      uint32_t high[4], low[4];
      load_matrices(high, t.high + in_vectors + c);
      load_matrices(low, t.low + in_vectors + c);
#pragma unroll
      for (uint32_t n = 0; n < kColumns; n += 2) {
        uint32_t k[4];
        load_matrices(k, t.keys + in_keys + n * 8 * t.stride + c);
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          multiply_f16(z[n + half], low, k[2 * half], k[2 * half + 1]);
          multiply_f16(z[n + half], high, k[2 * half], k[2 * half + 1]);
        }
      }
    }
    if (cap == 0) return;
#pragma unroll
    for (uint32_t n = 0; n < kColumns; ++n)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) z[n][i] = soft_cap(z[n][i], cap);
  }
};

// ---- log-sum-exps ----

// Consecutive keys of one head: n of them; the first is number `entry` of those that a row may see.
template <typename Format>
struct KeyTile {
  const typename Format::Unit* keys;
  uint32_t entry, n;
};

// All keys of a log-sum-exp, in tiles of at most kKeys: sinks, labelled entries, entries after the text, the
// chunk.
template <typename Format>
class KeyTiles {
  using Unit = typename Format::Unit;

 public:
  __device__ KeyTiles(const Labels& o, const HeadState& state, uint32_t head, uint32_t n_rows)
      : row_units_(Format::row_units(o.p.head_dim)),
        pool_(static_cast<const Unit*>(o.k) + uint64_t(state.first) * row_units_),
        held_(state.n_entries) {
    const Range r(o, state);
    const uint32_t begins[4] = {0, r.first, r.own, held_}, ends[4] = {r.sinks, r.end, held_, held_ + n_rows};
    chunk_ = static_cast<const Unit*>(o.chunk_k) + uint64_t(head) * o.p.chunk_capacity * row_units_;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      begin_[i] = begins[i];
      end_[i] = ends[i];
    }
  }
  __device__ uint32_t count() const {
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sum += tiles(i);
    return sum;
  }
  __device__ KeyTile<Format> operator[](uint32_t number) const {
    KeyTile<Format> tile{};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (number < tiles(i)) {
        tile.entry = begin_[i] + number * kKeys;
        tile.n = min(kKeys, end_[i] - tile.entry);
        tile.keys = i == 3 ? chunk_ + uint64_t(tile.entry - held_) * row_units_
                           : pool_ + uint64_t(tile.entry) * row_units_;
        return tile;
      }
      number -= tiles(i);
    }
    return tile;
  }

 private:
  __device__ uint32_t tiles(uint32_t i) const { return (end_[i] - begin_[i] + kKeys - 1) / kKeys; }

  uint32_t row_units_;
  const Unit *pool_, *chunk_;
  uint32_t held_, begin_[4], end_[4];
};

// One block per 32 vectors, part of the keys and KV head.
template <typename Format>
__global__ void __launch_bounds__(kThreads) sum_parts(const StepParams* step, Labels o) {
  extern __shared__ __align__(16) __half memory[];
  __shared__ LogSum of_later_keys[kVectors];
  const StepParams s = begin_kernel(step);
  const uint32_t head = blockIdx.z, first = blockIdx.x * kVectors, vectors = *o.count * o.p.group;
  if (first >= vectors) return;
  const HeadState state = o.heads[head];
  const KeyTiles<Format> tiles(o, state, head, s.n_rows);
  const uint32_t count = tiles.count(), begin = count * blockIdx.y / kParts,
                 end = count * (blockIdx.y + 1) / kParts;
  const Tiles t(memory, o.width);
  t.load_vectors(o.queries + uint64_t(head) * o.max_vectors * 2 * o.width, first, vectors);
  LogSum sums[2] = {kNoSum, kNoSum};
  uint32_t visible[2];  // entries that a vector sees; those of the chunk follow those of the pool
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t vector = first + Logits::vector(half);
    visible[half] = vector < vectors ? state.n_entries + o.rows[vector / o.p.group] + 1 : 0;
  }
  for (uint32_t number = begin; number < end; ++number) {
    const KeyTile<Format> tile = tiles[number];
    t.load_keys<Format>(tile.keys, tile.n, o.p.head_dim);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    const Logits logits(t, o.p.cap);
    __syncthreads();
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      float z[2 * kColumns];
#pragma unroll
      for (uint32_t i = 0; i < 2 * kColumns; ++i) {
        const uint32_t key = Logits::key(i / 2, i % 2);
        const bool seen = key < tile.n && tile.entry + key < visible[half];
        z[i] = seen ? logits.z[i / 2][2 * half + i % 2] : -kInfinity;
      }
      add(sums[half], log_sum(z));
    }
  }
  // Reduce over the four lanes of a vector, then over the two warps.
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
    for (uint32_t offset = 1; offset < 4; offset *= 2) {
      const LogSum other{__shfl_xor_sync(~0u, sums[half].peak, offset),
                         __shfl_xor_sync(~0u, sums[half].sum, offset)};
      add(sums[half], other);
    }
  const bool writes = threadIdx.x % 4 == 0, later = threadIdx.x >= 2 * kWarp;
  if (writes && later)
    for (uint32_t half = 0; half < 2; ++half) of_later_keys[Logits::vector(half)] = sums[half];
  __syncthreads();
  if (!writes || later) return;
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t vector = first + Logits::vector(half);
    if (vector >= vectors) continue;
    add(sums[half], of_later_keys[Logits::vector(half)]);
    o.parts[(uint64_t(head) * o.max_vectors + vector) * kParts + blockIdx.y] = sums[half];
  }
}

// One thread per vector and KV head.
__global__ void __launch_bounds__(kThreads) combine_parts(Labels o) {
  begin_kernel();
  const uint32_t vector = blockIdx.x * kThreads + threadIdx.x, head = blockIdx.y;
  if (vector >= *o.count * o.p.group) return;
  const uint32_t query = head * o.p.group + vector % o.p.group, index = vector / o.p.group;
  LogSum sum = o.sinks ? LogSum{o.sinks[query], 1} : kNoSum;
  const LogSum* parts = o.parts + (uint64_t(head) * o.max_vectors + vector) * kParts;
  for (uint32_t part = 0; part < kParts; ++part) add(sum, parts[part]);
  o.lse[uint64_t(o.rows[index]) * o.p.heads * o.p.group + query] = log_of(sum) + o.lengths[index];
}

// ---- labels ----

// One block per 64 entries and KV head.
template <typename Format>
__global__ void __launch_bounds__(kThreads) label_entries(Labels o) {
  extern __shared__ __align__(16) __half memory[];
  __shared__ float lse[kVectors], of_later_vectors[2][kKeys];
  begin_kernel();
  const uint32_t head = blockIdx.y, vectors = *o.count * o.p.group;
  const HeadState state = o.heads[head];
  const Range range(o, state);
  const uint32_t first_entry = range.first + blockIdx.x * kKeys;
  if (vectors == 0 || first_entry >= range.end) return;
  const uint32_t n = min(kKeys, range.end - first_entry);
  const Tiles t(memory, o.width);
  t.load_keys<Format>(static_cast<const typename Format::Unit*>(o.k) +
                          (uint64_t(state.first) + first_entry) * Format::row_units(o.p.head_dim),
                      n, o.p.head_dim);
  float best_logit[2 * kColumns], best_log[2 * kColumns];
#pragma unroll
  for (uint32_t i = 0; i < 2 * kColumns; ++i) best_logit[i] = best_log[i] = o.p.least;
  for (uint32_t first = 0; first < vectors; first += kVectors) {
    t.load_vectors(o.queries + uint64_t(head) * o.max_vectors * 2 * o.width, first, vectors);
    commit_copies();
    if (threadIdx.x < kVectors && first + threadIdx.x < vectors) {
      const uint32_t vector = first + threadIdx.x;
      lse[threadIdx.x] = o.lse[uint64_t(o.rows[vector / o.p.group]) * o.p.heads * o.p.group +
                               head * o.p.group + vector % o.p.group];
    }
    wait_copies<0>();
    __syncthreads();
    const Logits logits(t, o.p.cap);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t in_tile = Logits::vector(half), vector = first + in_tile;
      if (vector >= vectors) continue;
      const float sum = lse[in_tile];
      const float* worth =
          o.worth
              ? o.worth + uint64_t(head * o.p.group + vector % o.p.group) * o.p.label_capacity + first_entry
              : nullptr;
#pragma unroll
      for (uint32_t i = 0; i < 2 * kColumns; ++i) {
        const uint32_t key = Logits::key(i / 2, i % 2);
        const float z = logits.z[i / 2][2 * half + i % 2], more = worth && key < n ? worth[key] : 0;
        best_logit[i] = fmaxf(best_logit[i], z);
        best_log[i] = fmaxf(best_log[i], z - sum + more);
      }
    }
    __syncthreads();
  }
  // Reduce over the eight lanes of a key, then over the two warps.
#pragma unroll
  for (uint32_t i = 0; i < 2 * kColumns; ++i)
#pragma unroll
    for (uint32_t offset = 4; offset < kWarp; offset *= 2) {
      best_logit[i] = fmaxf(best_logit[i], __shfl_xor_sync(~0u, best_logit[i], offset));
      best_log[i] = fmaxf(best_log[i], __shfl_xor_sync(~0u, best_log[i], offset));
    }
  const bool writes = threadIdx.x % kWarp < 4, later = threadIdx.x / kWarp % 2 == 1;
#pragma unroll
  for (uint32_t i = 0; i < 2 * kColumns; ++i) {
    if (!writes || !later) continue;
    of_later_vectors[0][Logits::key(i / 2, i % 2)] = best_logit[i];
    of_later_vectors[1][Logits::key(i / 2, i % 2)] = best_log[i];
  }
  __syncthreads();
  if (!writes || later) return;
#pragma unroll
  for (uint32_t i = 0; i < 2 * kColumns; ++i) {
    const uint32_t key = Logits::key(i / 2, i % 2);
    if (key >= n) continue;
    const uint64_t at = uint64_t(head) * o.p.label_capacity + first_entry + key;
    o.max_logit[at] = fmaxf(o.max_logit[at], fmaxf(best_logit[i], of_later_vectors[0][key]));
    o.log_prob[at] = fmaxf(o.log_prob[at], fmaxf(best_log[i], of_later_vectors[1][key]));
  }
}

}  // namespace

bool takes_label(const Card& card, uint32_t head_dim) {
  constexpr size_t kOthers = 1 << 10;  // the kernels' other arrays in shared memory
  const auto width = static_cast<uint32_t>(round_up(head_dim, kDepth));
  return Tiles::bytes(width) + kOthers <= card.shared_bytes;
}

uint64_t label_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  return s.labels ? Scratch(s.chunk, m.heads, m.head_dim).end : 0;
}

void label(const Launch& l, const Label& op) {
  const LabelParams& p = op.p;
  const Scratch at(l.max_rows, p.heads * p.group, p.head_dim);
  const uint32_t max_vectors = l.max_rows * p.group,
                 width = static_cast<uint32_t>(round_up(p.head_dim, kDepth));
  const Labels o{.p = p,
                 .heads = l.heads + p.head_state,
                 .rope = {data<float2>(op.rope), p.rope.n_rot / 2},
                 .q = data<float>(op.q),
                 .marked = data<uint32_t>(op.marked),
                 .k = data<void>(op.k.values),
                 .chunk_k = data<void>(op.chunk_k.values),
                 .range = data<uint32_t>(op.range),
                 .x = data<float>(op.x),
                 .worth = data<float>(op.worth),
                 .sinks = data<float>(op.sinks),
                 .lse = data<float>(op.lse),
                 .max_logit = data<float>(op.max_logit),
                 .log_prob = data<float>(op.log_prob),
                 .width = width,
                 .max_vectors = max_vectors,
                 .queries = reinterpret_cast<__half*>(l.scratch + at.queries),
                 .parts = reinterpret_cast<LogSum*>(l.scratch + at.parts),
                 .lengths = reinterpret_cast<float*>(l.scratch + at.lengths),
                 .rows = reinterpret_cast<uint32_t*>(l.scratch + at.rows),
                 .count = reinterpret_cast<uint32_t*>(l.scratch + at.count)};
  const auto blocks = [](uint64_t n, uint32_t of) { return static_cast<uint32_t>(ceil_div(n, of)); };
  const size_t shared = Tiles::bytes(width);
  launch(l, gather_marked, l.max_rows, kThreads, 0, l.step, o);
  with_format(op.k.type, [&]<typename Format>(Format) {
    launch(l, sum_parts<Format>, dim3(blocks(max_vectors, kVectors), kParts, p.heads), kThreads, shared,
           l.step, o);
    launch(l, combine_parts, dim3(blocks(max_vectors, kThreads), p.heads), kThreads, 0, o);
    launch(l, label_entries<Format>, dim3(blocks(p.label_capacity, kKeys), p.heads), kThreads, shared, o);
  });
}

}  // namespace thimble::cuda
