#include "backends/cuda/host/card_memory.h"

#include <cuda_runtime.h>

#include "base/system.h"

namespace thimble::cuda {
namespace {

// The declarations from nvml.h that are used here, so that it need not be installed. Its functions return 0
// on success.
struct NvmlMemory {
  unsigned long long total, free, used;
};

struct Nvml {
  int (*by_bus_id)(const char* bus_id, void** device) = nullptr;
  int (*memory)(void* device, NvmlMemory*) = nullptr;

  Nvml() {
#ifdef _WIN32
    const SystemLibrary library("nvml.dll");
#else
    const SystemLibrary library("libnvidia-ml.so.1");
#endif
    auto* init = library.function<int()>("nvmlInit_v2");
    if (!init || init() != 0) return;
    by_bus_id = library.function<int(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
    memory = library.function<int(void*, NvmlMemory*)>("nvmlDeviceGetMemoryInfo");
  }
};

}  // namespace

std::optional<uint64_t> free_card_bytes(int index) {
  static const Nvml nvml;
  char bus_id[32];
  void* device = nullptr;
  NvmlMemory memory{};
  if (!nvml.by_bus_id || !nvml.memory || cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, index) != cudaSuccess ||
      nvml.by_bus_id(bus_id, &device) != 0 || nvml.memory(device, &memory) != 0)
    return {};
  return memory.free;
}

}  // namespace thimble::cuda
