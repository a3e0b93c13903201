#include "backends/vulkan/shaders.h"

#include "shader_list.inc"  // made by the build

namespace thimble::vulkan {

std::span<const uint32_t> shader_code(Shader shader) {
  static constexpr std::span<const uint32_t> kCode[] = {
#define X(name, file, defines) k##name##Code,
      THIMBLE_SHADERS(X, X)
#undef X
  };
  return kCode[static_cast<uint32_t>(shader)];
}

const char* shader_name(Shader shader) {
  static constexpr const char* kNames[] = {
#define X(name, file, defines) #name,
      THIMBLE_SHADERS(X, X)
#undef X
  };
  return kNames[static_cast<uint32_t>(shader)];
}

}  // namespace thimble::vulkan
