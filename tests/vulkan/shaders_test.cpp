// The SPIR-V that the build embeds, compiled by it or stored in the source tree.
#include "backends/vulkan/shaders.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/support/data.h"

namespace thimble::vulkan {
namespace {

TEST(VulkanShaders, AllAreSpirv) {
  for (uint32_t i = 0; i < static_cast<uint32_t>(Shader::kCount); ++i) {
    const std::span<const uint32_t> code = shader_code(static_cast<Shader>(i));
    ASSERT_FALSE(code.empty()) << shader_name(static_cast<Shader>(i));
    EXPECT_EQ(code[0], 0x07230203u) << shader_name(static_cast<Shader>(i));  // SPIR-V's magic number
  }
}

TEST(VulkanShaders, StoredOnesAreThoseOfTheFiles) {
#define X(name, file, defines)
#define XC(name, file, defines) Shader::k##name,
  const Shader stored[] = {THIMBLE_SHADERS(X, XC)};
#undef X
#undef XC
  for (const Shader shader : stored) {
    SCOPED_TRACE(shader_name(shader));
    std::ifstream file(project_file("backends/vulkan/spirv/" + std::string(shader_name(shader)) + ".spv"),
                       std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    std::vector<char> embedded;
    for (const uint32_t word : shader_code(shader))
      for (uint32_t byte = 0; byte < 4; ++byte) embedded.push_back(static_cast<char>(word >> 8 * byte));
    EXPECT_TRUE(bytes == embedded) << bytes.size() << " bytes stored, " << embedded.size() << " embedded";
  }
}

}  // namespace
}  // namespace thimble::vulkan
