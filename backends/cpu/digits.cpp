#include "backends/cpu/digits.h"

#include "backends/cpu/kernels.h"
#include "base/system.h"

#ifdef THIMBLE_X86_LEVELS
#include <cpuid.h>
#endif

namespace thimble::cpu {

// One table per compilation of isa/digits.cpp.
extern const DigitKernels kBaselineDigitKernels;
#ifdef THIMBLE_X86_LEVELS
extern const DigitKernels kV3DigitKernels, kV3VnniDigitKernels, kV4VnniDigitKernels;
#endif
#ifdef THIMBLE_ARM_DOT
extern const DigitKernels kDotDigitKernels;
#endif

#ifdef THIMBLE_X86_LEVELS
// clang 14 has no name for this feature.
static bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

uint32_t digit_kernel_sets(const DigitKernels* sets[4]) {
  uint32_t n = 0;
  sets[n++] = &kBaselineDigitKernels;
#ifdef THIMBLE_X86_LEVELS
  const Kernels* wider[4];
  const uint32_t levels = kernel_sets(wider);
  if (levels > 1) sets[n++] = &kV3DigitKernels;
  if (levels > 1 && has_avx_vnni()) sets[n++] = &kV3VnniDigitKernels;
  if (levels > 2 && __builtin_cpu_supports("avx512vnni")) sets[n++] = &kV4VnniDigitKernels;
#endif
#ifdef THIMBLE_ARM_DOT
  if (has_arm_dot_product()) sets[n++] = &kDotDigitKernels;
#endif
  return n;
}

const DigitKernels& digit_kernels() {
  static const DigitKernels* const fastest = [] {
    const DigitKernels* sets[4];
    return sets[digit_kernel_sets(sets) - 1];
  }();
  return *fastest;
}

}  // namespace thimble::cpu
