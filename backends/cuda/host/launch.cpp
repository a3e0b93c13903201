#include "backends/cuda/host/launch.h"

#include <mutex>

namespace thimble::cuda {

cudaError_t allow_shared(const void* kernel, size_t bytes) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  cudaFuncAttributes attributes;
  const cudaError_t e = cudaFuncGetAttributes(&attributes, kernel);
  if (e != cudaSuccess || static_cast<size_t>(attributes.maxDynamicSharedSizeBytes) >= bytes) return e;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

}  // namespace thimble::cuda
