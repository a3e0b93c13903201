// Thread block clusters, whose blocks run at the same time and can access each other's shared memory (from
// Hopper on). Device side. Each function also works for a cluster of one block, which every card supports.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// Goes before a kernel's launch bounds: its blocks form clusters of this many neighbours.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define THIMBLE_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define THIMBLE_CLUSTER(blocks)
#endif

// The two halves of a barrier of all threads of the cluster. Writes to shared memory before the first half
// are visible after the second. A block must not exit before the others are done with its memory, and the
// others must not access it before it has reached its first barrier.
template <uint32_t kBlocks>
__device__ inline void arrive_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kBlocks > 1) {
    __syncwarp();  // .aligned needs whole warps
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
#endif
}
template <uint32_t kBlocks>
__device__ inline void wait_at_cluster_barrier() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
}
template <uint32_t kBlocks>
__device__ inline void cluster_barrier() {
  arrive_at_cluster_barrier<kBlocks>();
  wait_at_cluster_barrier<kBlocks>();
}

// The address in block `rank` that corresponds to p in this block's shared memory.
template <uint32_t kBlocks, typename T>
__device__ inline T* of_rank(T* p, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kBlocks > 1) {
    T* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
    return there;
  }
#endif
  return p;
}

}  // namespace thimble::cuda
