// Shared by the kernels of query_score: the queries and entries of one KV head. Device side, except the last
// two functions.
#pragma once

#include "backends/cuda/kv_format.cuh"
#include "backends/cuda/log_sum.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/rope.cuh"
#include "backends/cuda/soft_cap.cuh"

namespace thimble::cuda {

// The op's arrays.
struct QueryScoreArrays {
  const float* q;
  const void *k, *chunk_k;
  const uint32_t* lists;  // or null
  Rope rope;
  float *sums, *cis, *chunk_cis;
};

// KV head blockIdx.y of those of the op.
struct QueryHead {
  const StepParams& step;
  const QueryScoreParams& p;
  const QueryScoreArrays& a;
  uint32_t head;
  HeadState own;
  EntryList list;
  QuerySpan span;

  __device__ QueryHead(const StepParams& s, const HeadState* heads, const QueryScoreParams& params,
                       const QueryScoreArrays& arrays)
      : step(s),
        p(params),
        a(arrays),
        head(params.first_head + blockIdx.y),
        own(heads[head]),
        list(entry_list(arrays.lists, head, params.list_capacity, step_entries(s, own))),
        span(query_span(s, own, params, list.count)) {}

  __device__ uint32_t vectors() const { return span.rows * p.group; }
  // The log-sums of a vector; after merging the first one is the total.
  __device__ float* sums(uint32_t vector) const {
    return a.sums + (uint64_t(head) * p.rows * p.group + vector) * kQueryScoreSums;
  }
  // The key and the score of entry i of the span.
  template <typename Format>
  __device__ const typename Format::Unit* key(uint32_t i) const {
    using Unit = typename Format::Unit;
    return at(static_cast<const Unit*>(a.k), static_cast<const Unit*>(a.chunk_k), list[entry_of(span, i)],
              Format::row_units(p.head_dim));
  }
  __device__ float& score(uint32_t i) const { return *at(a.cis, a.chunk_cis, entry_of(span, i), 1); }

  // The channels of pair i; after the rotating pairs, of any two channels.
  __device__ uint2 channels(uint32_t i) const {
    if (i >= a.rope.pairs) return {2 * i, 2 * i + 1};
    return {first_of_pair(i, p.rope.pairing), second_of_pair(i, p.rope.pairing, a.rope.pairs)};
  }
  // A pair of channels of a vector, scaled.
  __device__ float2 query(uint32_t vector, uint2 channels) const {
    const float* from =
        a.q + uint64_t(vector / p.group) * p.row_stride + (head * p.group + vector % p.group) * p.head_dim;
    return {from[channels.x] * p.scale, from[channels.y] * p.scale};
  }

 private:
  // Element in an array of [run][width] or [heads][chunk_capacity][width].
  template <typename T>
  __device__ T* at(T* pool, T* chunk, uint32_t entry, uint32_t width) const {
    return entry < own.n_entries
               ? pool + (uint64_t(own.first) + entry) * width
               : chunk + (uint64_t(head) * p.chunk_capacity + entry - own.n_entries) * width;
  }
};

__device__ inline float2 turned(float2 x, float2 angle) {
  return {x.x * angle.x - x.y * angle.y, x.x * angle.y + x.y * angle.x};
}

// The first and the last kernel for a single row.
void sum_weights_of_row(const Launch& l, const QueryScore& op, const QueryScoreArrays& arrays);
void score_by_row(const Launch& l, const QueryScore& op, const QueryScoreArrays& arrays, uint32_t tiles);

}  // namespace thimble::cuda
