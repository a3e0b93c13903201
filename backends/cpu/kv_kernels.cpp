#include "backends/cpu/kv_kernels.h"

#include "backends/cpu/kernels.h"

namespace thimble::cpu {

// One table per compilation of isa/kv_kernels.cpp, in the order of kernel_sets().
extern const KvKernels kBaselineKvKernels;
#ifdef THIMBLE_X86_LEVELS
extern const KvKernels kV3KvKernels, kV4KvKernels;
#endif

const KvKernels& kv_kernel_set(uint32_t set) {
  static const KvKernels* const kSets[] = {
      &kBaselineKvKernels,
#ifdef THIMBLE_X86_LEVELS
      &kV3KvKernels,
      &kV4KvKernels,
#endif
  };
  return *kSets[set];
}

const KvKernels& kv_kernels() {
  static const KvKernels* const fastest = [] {
    const Kernels* sets[4];
    return &kv_kernel_set(kernel_sets(sets) - 1);
  }();
  return *fastest;
}

const KvFormat* kv_format(DType type) {
  const KvKernels& kernels = kv_kernels();
  for (uint32_t i = 0; i < kernels.n_formats; ++i)
    if (kernels.formats[i].type == type) return kernels.formats + i;
  return nullptr;
}

}  // namespace thimble::cpu
