// Shared by all kernels: the order between kernels, the entries that a step works on, and reductions. Device
// side.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/launch.h"
#include "backends/regions.h"

#if __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "write 90a in CMAKE_CUDA_ARCHITECTURES: 90 lacks the matrix instructions that Hopper is used with"
#endif

namespace thimble::cuda {

inline constexpr uint32_t kWarp = 32;
inline constexpr float kInfinity = __builtin_huge_valf();

// Allows the next kernel to start; it then waits for this one in await_predecessor(). Call it first.
__device__ inline void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until all previous kernels have finished. Before this call, a kernel may only read data that no
// kernel of the program writes: weights, the step and the head table. It may also read, bypassing the
// first-level cache, what kernels before its immediate predecessor wrote, if that predecessor releases its
// successor after its own wait (expert_glu does). Call it even before an immediate return, because the
// successor relies on it to wait for the earlier kernels.
__device__ inline void await_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Both of the above, for kernels without work that can be done before the wait.
__device__ inline void begin_kernel() {
  release_successor();
  await_predecessor();
}
// The same, and returns the step. The step is loaded before the wait, since a kernel of a few microseconds
// should not wait for it afterwards.
__device__ inline StepParams begin_kernel(const StepParams* step) {
  release_successor();
  const StepParams s = *step;
  await_predecessor();
  return s;
}

// Prefetches the data at p into the first-level cache.
__device__ inline void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

__device__ inline uint32_t row_count(const StepParams& s, uint32_t rows) {
  return rows == kLogitRows ? s.n_logit_rows : s.n_rows;
}
// Whether this step reuses the selection of an earlier step.
__device__ inline bool selection_cached(const GateState* gate) { return gate && gate->hit; }

// The list of one KV head, or all entries if the op has no list.
struct EntryList {
  uint32_t count;
  const uint32_t* entries;  // null means that entry i is i
  __device__ uint32_t operator[](uint32_t i) const { return entries ? entries[i] : i; }
};
// `entries`: the head's entries including the step's rows.
__device__ inline EntryList entry_list(const uint32_t* lists, uint32_t head, uint32_t list_capacity,
                                       uint32_t entries) {
  if (!lists) return {entries, nullptr};
  const uint32_t* l = lists + uint64_t(head) * list_capacity;
  return {l[0], l + 1};
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

// The scale of an RMS norm of n numbers, from the sum of their squares.
__device__ inline float rms_scale(float squares, uint32_t n, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(n) + eps);
}

}  // namespace thimble::cuda
