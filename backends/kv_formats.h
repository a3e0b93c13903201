// The formats of keys and values that the GPU backends have. Shaders know a format by its place in the list
// (kv_format.glsl).
#pragma once

#include "base/dtype.h"

namespace thimble {

inline constexpr DType kKvFormats[] = {
    DType::kF16, DType::kQ8_0, DType::kQ4_0,
#ifdef THIMBLE_TEST_FORMATS
    DType::kBF16,  // shows that ops depend on a format only through its functions
#endif
};
inline constexpr uint32_t kNoKvFormat = ~0u;
inline uint32_t kv_format_number(DType type) {
  for (uint32_t i = 0; i < sizeof kKvFormats / sizeof *kKvFormats; ++i)
    if (kKvFormats[i] == type) return i;
  return kNoKvFormat;
}
inline bool has_kv_format(DType type) { return kv_format_number(type) != kNoKvFormat; }
// Whether rows consist of blocks (BlockRows in backends/cpu/isa/kv_formats.h).
inline bool has_kv_blocks(DType type) { return dtype_info(type).block > 1; }

}  // namespace thimble
