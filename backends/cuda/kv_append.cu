// kv_append: the step's k and v rows go into the pool or the chunk buffer.
#include "backends/cuda/ops.h"
#include "backends/cuda/rope.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kWarps = 8;  // of a block

// Channel c of a head's key, rotated.
__device__ float rotated(const float* k, uint32_t c, const Rope& rope, uint32_t pairing, uint32_t position) {
  if (c >= 2 * rope.pairs) return k[c];
  const bool adjacent = pairing == kRopeAdjacent, second = adjacent ? c % 2 : c >= rope.pairs;
  const uint32_t pair = adjacent ? c / 2 : second ? c - rope.pairs : c;
  const float x = k[first_of_pair(pair, pairing)], y = k[second_of_pair(pair, pairing, rope.pairs)];
  const float2 angle = rope.angle(position, pair);
  return second ? x * angle.y + y * angle.x : x * angle.x - y * angle.y;
}

// A warp takes one head of a row.
__global__ void kv_append_kernel(const StepParams* step, KvAppendParams p, const float* qkv, Rope rope,
                                 __half* k, __half* v, int32_t* pos) {
  begin_kernel();
  const uint32_t vector = blockIdx.x * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t row = vector / p.heads, head = p.first_head + vector % p.heads;
  if (row >= step->n_rows) return;
  const int32_t position = step->position + static_cast<int32_t>(row);
  const uint64_t entry = uint64_t(head) * p.capacity + (p.into == kIntoPool ? step->n_entries : 0) + row;
  const float* from = qkv + uint64_t(row) * p.row_stride + head * p.head_dim;
  const float *k_from = from + p.k_column, *v_from = from + p.v_column;
  __half *k_to = k + entry * p.head_dim, *v_to = v + entry * p.head_dim;
  if (p.rope.mode == kRopeOriginal) {
    for (uint32_t c = lane; c < p.head_dim; c += kWarp) {
      k_to[c] = __float2half_rn(rotated(k_from, c, rope, p.rope.pairing, static_cast<uint32_t>(position)));
      v_to[c] = __float2half_rn(v_from[c]);
    }
  } else {
#pragma unroll 4
    for (uint32_t c = lane; c < p.head_dim; c += kWarp) {
      k_to[c] = __float2half_rn(k_from[c]);
      v_to[c] = __float2half_rn(v_from[c]);
    }
  }
  if (lane == 0) pos[entry] = position;
}

}  // namespace

void kv_append(const Launch& l, const KvAppend& op) {
  const Rope rope{data<float2>(op.rope), op.p.rope.n_rot / 2};
  const uint32_t blocks = static_cast<uint32_t>(ceil_div(uint64_t(l.max_rows) * op.p.heads, kWarps));
  launch(l, kv_append_kernel, blocks, kWarps * kWarp, 0, l.step, op.p, data<float>(op.qkv), rope,
         data<__half>(op.k), data<__half>(op.v), data<int32_t>(op.pos));
}

}  // namespace thimble::cuda
