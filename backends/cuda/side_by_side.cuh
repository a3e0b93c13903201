// Several small ops in one launch. Each op is a task, and all threads of its blocks, 0 to blocks - 1, call
// it; a task without work has no blocks. If a task has prepare(), it is called first and may only read what a
// kernel may read before await_predecessor().
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

inline constexpr uint32_t kMostTaskThreads = 1024;

template <typename... Tasks>
__global__ void __launch_bounds__(kMostTaskThreads)
    side_by_side_kernel(const StepParams* step, Tasks... tasks) {
  release_successor();
  const StepParams s = *step;
  const auto take = [](uint32_t& block, auto& task, const auto& does) {
    if (block < task.blocks) does(task, block);
    block -= task.blocks;  // a block whose task is done has a number beyond all others
  };
  uint32_t block = blockIdx.x;
  const auto prepare = [&](auto& task, uint32_t own) {
    if constexpr (requires { task.prepare(s, own); }) task.prepare(s, own);
  };
  (take(block, tasks, prepare), ...);
  await_predecessor();
  block = blockIdx.x;
  const auto run = [&](auto& task, uint32_t own) { task(s, own); };
  (take(block, tasks, run), ...);
}

template <typename... Tasks>
void launch_side_by_side(const Launch& l, uint32_t threads, const Tasks&... tasks) {
  launch(l, side_by_side_kernel<Tasks...>, (tasks.blocks + ...), threads, 0, l.step, tasks...);
}

}  // namespace thimble::cuda
