// What an op gets while a program is recorded, and how it puts a kernel into it. Host side.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/backend.h"
#include "base/bits.h"

namespace thimble::cuda {

// The card that a program is recorded for.
struct Card {
  int index = 0;
  int major = 0, minor = 0;  // compute capability
  uint32_t multiprocessors = 0;
  uint32_t shared_bytes =
      0;  // what one block may have when it asks for it (cudaDevAttrMaxSharedMemoryPerBlockOptin)
};

// Device memory, or pinned host memory (`mapped` is set), which kernels reach at the same address.
struct CudaBuffer : Buffer {
  std::byte* address = nullptr;
};

// The device address of a view's first element; null for an empty view.
template <typename T>
T* data(const View& v) {
  return v ? reinterpret_cast<T*>(static_cast<CudaBuffer*>(v.buffer)->address + v.offset) : nullptr;
}

// A program being recorded. An op may use `scratch` from its first byte on; what it leaves there is gone with
// the next op.
struct Launch {
  cudaStream_t stream = nullptr;
  // Of copies that run next to kernels (stage), and what the two streams wait for each other with.
  cudaStream_t copies = nullptr;
  cudaEvent_t crossing = nullptr;
  const StepParams* step = nullptr;  // device memory; kernels read it, the host cannot
  const HeadState* heads = nullptr;  // the same: the table of all layers
  uint32_t max_rows = 0;             // grids are made for as many rows; StepParams says how many there are
  std::byte* scratch = nullptr;      // device memory, 256-byte aligned, as large as needs() said
  uint64_t scratch_bytes = 0;
  Card card;
  cudaError_t* error = nullptr;            // the first error sticks
  std::vector<View>* rewritten = nullptr;  // where keys may have changed by ops other than kv_append
};

// Rows that an op of this program may get: `rows` is kStepRows or kLogitRows.
inline uint32_t most_rows(const Launch& l, uint32_t rows) {
  return rows == kLogitRows && l.max_rows > kMostLogitRows ? kMostLogitRows : l.max_rows;
}

// Whether the program has written none of these keys before but the step's own, after all others.
bool keys_stay(const Launch&, const View& keys);

// Lets a kernel have so much shared memory, which takes asking above 48 KiB. The kernel is the whole
// process's: other threads record too, so the limit only grows.
cudaError_t allow_shared(const void* kernel, size_t bytes);

// Puts a kernel into the program. From Hopper on it may start before the kernel before it has finished, so
// every kernel calls await_predecessor() (kernel.cuh) before it touches memory that any other kernel writes.
template <typename... Params, typename... Args>
void launch(const Launch& l, void (*kernel)(Params...), dim3 blocks, dim3 threads, size_t shared_bytes,
            const Args&... args) {
  if (*l.error != cudaSuccess) return;
  if (shared_bytes > 48 << 10) *l.error = allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  if (*l.error != cudaSuccess) return;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = l.stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (l.card.major >= 9) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  // A multiprocessor that splits its memory anew for the next kernel has to drain first: in decode, where
  // kernels take microseconds, all ask for the same split.
  if (l.max_rows == 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[config.numAttrs++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  }
  *l.error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace thimble::cuda
