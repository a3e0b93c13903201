#include <algorithm>
#include <cstring>

#include "backends/cuda/host/store_step.h"
#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 128;

// As large as every driver allows. The limit for all parameters of a kernel is 4 KiB.
struct Piece {
  uint4 words[248];
};

__global__ void __launch_bounds__(kThreads)
    store_step_kernel(const __grid_constant__ Piece piece, uint32_t words, uint4* to) {
  for (uint32_t i = threadIdx.x; i < words; i += kThreads) to[i] = piece.words[i];
}

}  // namespace

// The values are passed as kernel parameters, so there is no staging buffer that a second submit could
// overwrite.
cudaError_t store_step(cudaStream_t stream, std::span<const std::byte> values, std::byte* to) {
  cudaLaunchConfig_t one{};
  one.gridDim = dim3(1);
  one.blockDim = dim3(kThreads);
  one.stream = stream;
  cudaError_t e = cudaSuccess;
  for (size_t at = 0; at < values.size() && e == cudaSuccess; at += sizeof(Piece)) {
    Piece piece{};
    const size_t bytes = std::min(values.size() - at, sizeof piece);
    std::memcpy(&piece, values.data() + at, bytes);
    e = cudaLaunchKernelEx(&one, store_step_kernel, piece,
                           static_cast<uint32_t>(ceil_div(bytes, sizeof(uint4))),
                           reinterpret_cast<uint4*>(to + at));
  }
  return e;
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
