#include "backends/cuda/launch.h"

#include <algorithm>
#include <mutex>

#include "backends/fusion.h"

namespace thimble::cuda {

bool keys_stay(const Launch& l, const View& keys) {
  return std::none_of(l.rewritten->begin(), l.rewritten->end(),
                      [&](const View& v) { return overlap(v, keys); });
}

cudaError_t allow_shared(const void* kernel, size_t bytes) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  cudaFuncAttributes attributes;
  const cudaError_t e = cudaFuncGetAttributes(&attributes, kernel);
  if (e != cudaSuccess || static_cast<size_t>(attributes.maxDynamicSharedSizeBytes) >= bytes) return e;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

}  // namespace thimble::cuda
