// Parameters of the shaders of KV ops, where they differ from the op's own parameters: for C++ and GLSL.
#ifndef THIMBLE_VULKAN_KV_PARAMS_H
#define THIMBLE_VULKAN_KV_PARAMS_H

#ifdef __cplusplus
#include "backends/op_params.h"
namespace thimble::vulkan {
#endif

// For norm_append.
struct NormAppendParams {
  KvAppendParams append;  // queries begin at column 0
  uint query_heads;
  float eps;
};

#ifdef __cplusplus
}  // namespace thimble::vulkan
#endif

#endif
