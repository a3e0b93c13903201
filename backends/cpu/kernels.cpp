#include "backends/cpu/kernels.h"

namespace thimble::cpu {

// One table per compilation of isa/kernels.cpp.
extern const Kernels kBaselineKernels;
#ifdef THIMBLE_X86_LEVELS
extern const Kernels kV3Kernels, kV4Kernels;
#endif

uint32_t kernel_sets(const Kernels* sets[4]) {
  uint32_t n = 0;
  sets[n++] = &kBaselineKernels;
#ifdef THIMBLE_X86_LEVELS
  __builtin_cpu_init();
  // The features that isa/ is compiled with: x86-64-v3 and -v4, as far as it uses them. F16C comes with AVX2;
  // clang 14 has no name for it.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (v3) sets[n++] = &kV3Kernels;
  if (v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    sets[n++] = &kV4Kernels;
#endif
  return n;
}

const Kernels& kernels() {
  static const Kernels* const fastest = [] {
    const Kernels* sets[4];
    return sets[kernel_sets(sets) - 1];
  }();
  return *fastest;
}

}  // namespace thimble::cpu
