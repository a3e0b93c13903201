// Tensor maps for Hopper's bulk tensor copies, created by the driver. Host code only.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace thimble::cuda {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
// The driver's function that encodes tensor maps. It is found at run time because the library does not link
// libcuda. Null if the driver does not have it.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(f)
                                                                         : nullptr;
  }();
  return found;
}

// The map of an f16 matrix [rows][cols], in boxes of box_rows rows and 64 columns with a swizzle of 128
// bytes.
inline cudaError_t make_tensor_map(CUtensorMap& map, const void* matrix, uint64_t rows, uint64_t cols,
                                   uint32_t box_rows) {
  const cuuint64_t extent[] = {cols, rows}, stride[] = {cols * 2};
  const cuuint32_t box[] = {64, box_rows}, step[] = {1, 1};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(matrix), extent, stride, box,
                     step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace thimble::cuda
