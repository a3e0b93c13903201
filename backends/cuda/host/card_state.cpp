#include "backends/cuda/host/card_state.h"

namespace thimble::cuda {

Status CardState::use() const {
  if (lost)
    return error(Code::kDeviceLost,
                 "cuda:%d was lost by an earlier error; start the program again, or use --device cpu",
                 card.index);
  return check(cudaSetDevice(card.index), "being chosen");
}

Result<uint64_t> CardState::free_bytes() const {
  size_t free = 0, total = 0;
  THIMBLE_TRY(check(cudaMemGetInfo(&free, &total), "counting its memory"));
  return uint64_t(free);
}

Status CardState::check(cudaError_t e, const char* doing) const {
  if (e == cudaSuccess) return {};
  cudaGetLastError();  // clears the error, because it is reported here
  const char* reason = cudaGetErrorString(e);
  switch (e) {
    case cudaErrorMemoryAllocation:
      return error(
          Code::kOutOfMemory,
          "cuda:%d is out of memory while %s; use a smaller pool or budget, or free other programs' memory",
          card.index, doing);
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
      return error(Code::kUnsupported,
                   "cuda:%d has compute capability %d.%d, but this build has no kernels for it; build with "
                   "-DCMAKE_CUDA_ARCHITECTURES=%d%d%s, or use --device cpu",
                   card.index, card.major, card.minor, card.major, card.minor, card.major == 9 ? "a" : "");
    case cudaErrorAssert:
    case cudaErrorContained:
    case cudaErrorDevicesUnavailable:
    case cudaErrorECCUncorrectable:
    case cudaErrorExternalDevice:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorMisalignedAddress:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorUnknown:
      lost = true;
      return error(Code::kDeviceLost,
                   "cuda:%d was lost while %s: %s; start the program again, or use --device cpu", card.index,
                   doing, reason);
    default:
      return error(Code::kInternal, "cuda:%d failed while %s: %s", card.index, doing, reason);
  }
}

}  // namespace thimble::cuda
