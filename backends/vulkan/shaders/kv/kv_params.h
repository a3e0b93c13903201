// What the shaders of ops on keys and values are told, where it is more than the op's own parameters: for C++
// and GLSL.
#ifndef THIMBLE_VULKAN_KV_PARAMS_H
#define THIMBLE_VULKAN_KV_PARAMS_H

#ifdef __cplusplus
#include "backends/op_params.h"
namespace thimble::vulkan {
#endif

// norm_append.
struct NormAppendParams {
  KvAppendParams append;  // queries stand at column 0
  uint query_heads;
  float eps;
};

#ifdef __cplusplus
}  // namespace thimble::vulkan
#endif

#endif
