// Small ops in one launch, side by side. A task is such an op: all threads of each of its blocks, 0 to
// blocks - 1, call it; it has no blocks where there is nothing to do.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

inline constexpr uint32_t kMostTaskThreads = 1024;

template <typename... Tasks>
__global__ void __launch_bounds__(kMostTaskThreads)
    side_by_side_kernel(const StepParams* step, Tasks... tasks) {
  const StepParams s = begin_kernel(step);
  uint32_t block = blockIdx.x;
  const auto take = [&](const auto& task) {
    if (block < task.blocks) task(s, block);
    block -= task.blocks;  // a block that had its task is now far behind all others
  };
  (take(tasks), ...);
}

template <typename... Tasks>
void launch_side_by_side(const Launch& l, uint32_t threads, const Tasks&... tasks) {
  launch(l, side_by_side_kernel<Tasks...>, (tasks.blocks + ...), threads, 0, l.step, tasks...);
}

}  // namespace thimble::cuda
