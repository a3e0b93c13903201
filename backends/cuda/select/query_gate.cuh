// query_gate: whether this step's query is close enough to the query that made the cached selection. Host and
// device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// T: float, or float4 if both queries are aligned to it. Runs in one block of kThreads; all its loads are
// issued before it waits for any of them.
template <typename T>
struct QueryGateTask {
  static constexpr uint32_t kThreads = 1024, kHeld = 8;  // kHeld: columns per thread at once

  uint32_t blocks = 0;
  uint32_t cols = 0;
  const T* q = nullptr;
  T* cached = nullptr;
  GateState* gate = nullptr;
  const HeadState* heads = nullptr;  // from KV head 0 of the layer on
  uint32_t head_count = 0;
  uint32_t now_selecting = 0;  // KV heads from which this step selects

  QueryGateTask() = default;
  QueryGateTask(const Launch& l, const QueryGate& op)
      : blocks(1),
        cols(op.p.cols),
        q(data<T>(op.q)),
        cached(data<T>(op.cached)),
        gate(data<GateState>(op.gate)),
        heads(l.heads + op.p.head_state),
        head_count(op.p.heads) {}

  // Within a generation a run only grows, so equal counts mean an unchanged set of heads to select from.
  __device__ void prepare(const StepParams& s, uint32_t) {
    uint32_t count = 0;
    for (uint32_t head = threadIdx.x % kWarp; head < head_count; head += kWarp)
      count += selects(s, step_entries(s, heads[head]));
    now_selecting = __reduce_add_sync(~0u, count);
  }

  __device__ void operator()(const StepParams& s, uint32_t) const {
    constexpr uint32_t kColumns = sizeof(T) / sizeof(float), kLoads = kHeld / kColumns;
    constexpr uint32_t kAtOnce = kLoads * kThreads;
    __shared__ float3 of_warp[kThreads / kWarp];
    const uint32_t n = cols / kColumns;
    T x[kLoads], y[kLoads];
    const auto load = [&](uint32_t first, const T* from, T(&to)[kLoads]) {
#pragma unroll
      for (uint32_t i = 0; i < kLoads; ++i) {
        const uint32_t at = first + i * kThreads + threadIdx.x;
        to[i] = at < n ? from[at] : T{};
      }
    };
    load(0, q, x);
    load(0, cached, y);
    const GateState before = *gate;

    // The three products add in the same order, so those of equal queries have equal bits. Without a cached
    // query they are computed in vain, which costs less than waiting for the gate first.
    float3 dot{0, 0, 0};  // q cached, q q, cached cached
    for (uint32_t first = 0; first < n; first += kAtOnce) {
      if (first != 0) {
        load(first, q, x);
        load(first, cached, y);
      }
#pragma unroll
      for (uint32_t i = 0; i < kLoads; ++i)
#pragma unroll
        for (uint32_t c = 0; c < kColumns; ++c) {
          const float a = reinterpret_cast<const float*>(&x[i])[c],
                      b = reinterpret_cast<const float*>(&y[i])[c];
          dot = {__fmaf_rn(a, b, dot.x), __fmaf_rn(a, a, dot.y), __fmaf_rn(b, b, dot.z)};
        }
    }
    dot = {warp_sum(dot.x), warp_sum(dot.y), warp_sum(dot.z)};
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = dot;
    __syncthreads();
    dot = of_warp[threadIdx.x % kWarp];
    dot = {warp_sum(dot.x), warp_sum(dot.y), warp_sum(dot.z)};

    if (now_selecting == 0) {
      if (threadIdx.x == 0) gate->hit = gate->valid = 0;
      return;
    }
    bool hit = false;
    // Miss if more than half of the local window passed since the last miss: too many tokens left the window
    // without having been candidates.
    if (before.valid && before.generation == s.generation && before.selecting == now_selecting &&
        s.position - before.position <= static_cast<int32_t>(s.n_local / 2) && s.theta < 1) {
      // We avoid a division: equal queries then give sqrt(x * x) = x and hit for every theta below 1,
      // including all-zero queries.
      const bool close = dot.x >= s.theta * sqrtf(dot.y * dot.z);
      hit = close || s.theta <= -1;
    }
    if (threadIdx.x == 0) {
      gate->hit = hit;
      if (hit) {
        gate->hits = before.hits + 1;
      } else {
        gate->misses = before.misses + 1;
        gate->valid = 1;
        gate->generation = s.generation;
        gate->position = s.position;
        gate->selecting = now_selecting;
      }
    }
    if (hit) return;
    for (uint32_t first = 0; first < n; first += kAtOnce) {
      if (n > kAtOnce) load(first, q, x);  // otherwise it is already loaded
#pragma unroll
      for (uint32_t i = 0; i < kLoads; ++i) {
        const uint32_t at = first + i * kThreads + threadIdx.x;
        if (at < n) cached[at] = x[i];
      }
    }
  }
};

// Whether QueryGateTask<float4> can be used.
inline bool in_quads(const QueryGate& op) {
  const uintptr_t addresses =
      reinterpret_cast<uintptr_t>(data<float>(op.q)) | reinterpret_cast<uintptr_t>(data<float>(op.cached));
  return addresses % sizeof(float4) == 0 && op.p.cols % 4 == 0;
}

}  // namespace thimble::cuda
