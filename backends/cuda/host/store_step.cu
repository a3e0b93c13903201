#include "backends/cuda/kernel.cuh"
#include "backends/cuda/host/store_step.h"

namespace thimble::cuda {

static __global__ void store_step_kernel(StepParams values, StepParams* step) { *step = values; }

// The values travel as a kernel's parameters: there is no staging buffer that a second submit could
// overwrite.
cudaError_t store_step(cudaStream_t stream, const StepParams& values, StepParams* step) {
  cudaLaunchConfig_t one{};
  one.gridDim = one.blockDim = dim3(1);
  one.stream = stream;
  return cudaLaunchKernelEx(&one, store_step_kernel, values, step);
}

cudaError_t find_kernels(Card& card) {
  cudaFuncAttributes attributes;
  const cudaError_t e = cudaFuncGetAttributes(&attributes, store_step_kernel);
  if (e != cudaSuccess) return e;
  if (attributes.ptxVersion < 10 * card.major + card.minor) {
    card.major = attributes.ptxVersion / 10;
    card.minor = attributes.ptxVersion % 10;
  }
  return cudaSuccess;
}

}  // namespace thimble::cuda
