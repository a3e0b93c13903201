// Everything that a token's row of q, k and v needs, in one kernel: the norms of queries and keys, kv_append,
// and the copy into the ring and the query gate if they follow. As separate kernels each takes 2.5 us on an
// H200, in every layer.
#include "backends/cuda/dense/copy.cuh"
#include "backends/cuda/kv/kv_append.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/select/query_gate.cuh"
#include "backends/cuda/side_by_side.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kNormThreads = 128;

// Normalises a row's keys and queries in place.
struct HeadNorms {
  const float *k_weight, *q_weight;
  float *k, *q;
  uint32_t k_heads, q_heads, head_dim;
  float eps;
};

// A warp normalises a key and appends it with its value, or normalises a query. Loads of data that is ready
// are issued before the wait, and loads of the previous kernels' results all at once: one after the other
// they took 4.4 us on an H100.
template <typename Keys, typename Values>
__global__ void __launch_bounds__(kNormThreads)
    norm_append_kernel(const StepParams* step, HeadNorms n, KvAppendTask<Keys, Values> append) {
  release_successor();
  __shared__ float keys[kNormThreads / kWarp][kWideHeadDim];
  const StepParams s = *step;
  append.prepare(s, blockIdx.x);
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp,
                 head = blockIdx.x * (kNormThreads / kWarp) + warp;
  const bool is_key = head < n.k_heads, is_head = head < n.k_heads + n.q_heads;
  float* const own = is_key ? n.k + head * n.head_dim : n.q + (head - n.k_heads) * n.head_dim;
  const float* const weight = is_key ? n.k_weight : n.q_weight;
  float weights[kWideHeadDim / kWarp], x[kWideHeadDim / kWarp], sum = 0;
  const auto for_each_channel = [&](const auto& see) {
#pragma unroll
    for (uint32_t i = 0; i < kWideHeadDim / kWarp; ++i)
      if (i * kWarp + lane < n.head_dim) see(i, i * kWarp + lane);
  };
  for_each_channel([&](uint32_t i, uint32_t c) { weights[i] = weight[c]; });
  await_predecessor();
  if (!is_head || s.n_rows == 0) return;
  for_each_channel([&](uint32_t i, uint32_t c) { x[i] = own[c]; });
  const float* const value = append.qkv + append.p.v_column + head * n.head_dim;  // for a key
  for (uint32_t c = 4 * lane; is_key && c < n.head_dim; c += 4 * kWarp) prefetch(value + c);
  for_each_channel([&](uint32_t i, uint32_t) { sum += x[i] * x[i]; });
  const float scale = rms_scale(warp_sum(sum), n.head_dim, n.eps);
  for_each_channel([&](uint32_t i, uint32_t c) { own[c] = keys[warp][c] = x[i] * scale * weights[i]; });
  __syncwarp();
  if (is_key) append.put(0, keys[warp], value, s.position);
}

}  // namespace

void append_token(const Launch& l, const RmsNorm& q, const RmsNorm& k, const KvAppend& append) {
  const HeadNorms norms{.k_weight = data<float>(k.weight),
                        .q_weight = data<float>(q.weight),
                        .k = data<float>(k.y),
                        .q = data<float>(q.y),
                        .k_heads = k.p.groups,
                        .q_heads = q.p.groups,
                        .head_dim = append.p.head_dim,
                        .eps = k.p.eps};
  with_formats(append.k.type, append.v.type, [&]<typename Keys, typename Values>(Keys, Values) {
    launch(l, norm_append_kernel<Keys, Values>,
           static_cast<uint32_t>(ceil_div(k.p.groups + q.p.groups, kNormThreads / kWarp)), kNormThreads, 0,
           l.step, norms, KvAppendTask<Keys, Values>(l, append, kNormThreads));
  });
}

void append_token(const Launch& l, const KvAppend& append, const Copy* copy, const QueryGate* gate) {
  constexpr uint32_t kThreads = QueryGateTask<float4>::kThreads;
  const bool quads = gate && in_quads(*gate);
  with_formats(append.k.type, append.v.type, [&]<typename Keys, typename Values>(Keys, Values) {
    launch_side_by_side(l, kThreads, quads ? QueryGateTask<float4>(l, *gate) : QueryGateTask<float4>(),
                        KvAppendTask<Keys, Values>(l, append, kThreads),
                        copy ? CopyTask(l, *copy, kThreads) : CopyTask());
  });
  if (gate && !quads) query_gate(l, *gate);
  if (copy) l.rewritten->push_back(copy->dst);
}

}  // namespace thimble::cuda
