#include "backends/cpu/mixer_kernels.h"

#include "backends/cpu/kernels.h"

namespace thimble::cpu {

// One table per compilation of isa/mixer_kernels.cpp, in the order of kernel_sets().
extern const MixerKernels kBaselineMixerKernels;
#ifdef THIMBLE_X86_LEVELS
extern const MixerKernels kV3MixerKernels, kV4MixerKernels;
#endif

const MixerKernels& mixer_kernel_set(uint32_t set) {
  static const MixerKernels* const kSets[] = {
      &kBaselineMixerKernels,
#ifdef THIMBLE_X86_LEVELS
      &kV3MixerKernels,
      &kV4MixerKernels,
#endif
  };
  return *kSets[set];
}

const MixerKernels& mixer_kernels() {
  static const MixerKernels* const fastest = [] {
    const Kernels* sets[4];
    return &mixer_kernel_set(kernel_sets(sets) - 1);
  }();
  return *fastest;
}

}  // namespace thimble::cpu
