// kv_append: appends the step's k and v rows to the pool or the chunk buffer. Host and device side.
#pragma once

#include "backends/cuda/kv_format.cuh"
#include "backends/cuda/rope.cuh"

namespace thimble::cuda {

// A warp appends one head of a row.
template <typename Keys, typename Values>
struct KvAppendTask {
  using Key = typename Keys::Unit;
  using Value = typename Values::Unit;

  uint32_t blocks;
  KvAppendParams p;
  const HeadState* heads;  // from KV head 0 of the layer on
  Rope rope;
  const float* qkv;
  Key* k;
  Value* v;  // null if values are channels of the keys
  int32_t* pos;
  uint32_t* saturated;
  uint64_t first_entry = 0;  // index of the head's first new row

  KvAppendTask(const Launch& l, const KvAppend& op, uint32_t threads)
      : blocks(static_cast<uint32_t>(ceil_div(uint64_t(l.max_rows) * op.p.heads, threads / kWarp))),
        p(op.p),
        heads(l.heads + op.p.head_state),
        rope{data<float2>(op.rope), op.p.rope.n_rot / 2},
        qkv(data<float>(op.qkv)),
        k(data<Key>(op.k.values)),
        v(data<Value>(op.v.values)),
        pos(data<int32_t>(op.pos)),
        saturated(data<uint32_t>(op.saturated)) {}

  // Channel c of a head's key after rotation.
  __device__ float rotated(const float* key, uint32_t c, uint32_t position) const {
    if (c >= 2 * rope.pairs) return key[c];
    const uint32_t pairing = p.rope.pairing;
    const bool adjacent = pairing == kRopeAdjacent, second = adjacent ? c % 2 : c >= rope.pairs;
    const uint32_t pair = adjacent ? c / 2 : second ? c - rope.pairs : c;
    const float x = key[first_of_pair(pair, pairing)], y = key[second_of_pair(pair, pairing, rope.pairs)];
    const float2 angle = rope.angle(position, pair);
    return second ? x * angle.y + y * angle.x : x * angle.x - y * angle.y;
  }

  // The row and head that a warp appends.
  struct Place {
    uint32_t row, head;
  };
  __device__ Place place(uint32_t block) const {
    const uint32_t vector = block * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    return {vector / p.heads, p.first_head + vector % p.heads};
  }

  __device__ void prepare(const StepParams&, uint32_t block) {
    const uint32_t head = place(block).head;
    first_entry = p.into == kIntoPool ? uint64_t(heads[head].first) + heads[head].n_entries
                                      : uint64_t(head) * p.chunk_capacity;
  }

  __device__ void operator()(const StepParams& s, uint32_t block) const { append(s, block, nullptr); }

  // Stores a row's key and value for the head that was passed to prepare().
  __device__ void put(uint32_t row, const float* key, const float* value, int32_t position) const {
    constexpr uint32_t kAtOnce = 4;  // channels per lane
    const uint32_t lane = threadIdx.x % kWarp;
    const uint64_t entry = first_entry + row;
    Key* const k_to = k + entry * Keys::row_units(p.head_dim);
    Value* const v_to = v + entry * Values::row_units(p.head_dim);
    uint32_t beyond = 0;
    for (uint32_t first = lane; first < p.head_dim; first += kAtOnce * kWarp) {
      float x[kAtOnce], y[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t c = min(first + i * kWarp, p.head_dim - 1);
        x[i] = p.rope.mode == kRopeOriginal ? rotated(key, c, static_cast<uint32_t>(position)) : key[c];
        y[i] = v ? value[c] : 0;
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t c = first + i * kWarp;
        if (c >= p.head_dim) break;
        Keys::store(k_to, p.head_dim, c, x[i], beyond);
        if (v) Values::store(v_to, p.head_dim, c, y[i], beyond);
      }
    }
    if (__any_sync(~0u, beyond)) {
      beyond = __reduce_add_sync(~0u, beyond);
      if (lane == 0) atomicAdd(saturated, beyond);
    }
    if (lane == 0) pos[entry] = position;
  }

 protected:
  // `positions`: of the rows; null if they are consecutive.
  __device__ void append(const StepParams& s, uint32_t block, const int32_t* positions) const {
    const auto [row, head] = place(block);
    if (row >= s.n_rows) return;
    const float* const from = qkv + uint64_t(row) * p.row_stride + head * p.head_dim;
    put(row, from + p.k_column, from + p.v_column,
        positions ? positions[row] : s.position + static_cast<int32_t>(row));
  }
};

// The same for rows with explicit positions.
template <typename Keys, typename Values>
struct KvAppendPositionsTask : KvAppendTask<Keys, Values> {
  const int32_t* positions;

  KvAppendPositionsTask(const Launch& l, const KvAppend& op, uint32_t threads)
      : KvAppendTask<Keys, Values>(l, op, threads), positions(data<int32_t>(op.positions)) {}

  __device__ void operator()(const StepParams& s, uint32_t block) const { this->append(s, block, positions); }
};

}  // namespace thimble::cuda
