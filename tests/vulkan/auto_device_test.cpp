// Which devices "auto" looks at. This test has its own program, because drivers stay loaded.
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "backends/registry.h"
#include "base/system.h"

namespace thimble {
namespace {

TEST(AutoDevice, LoadsNoVulkanDriverWithoutACard) {
  if (has_graphics_device()) GTEST_SKIP() << "this machine has a graphics device";
  ASSERT_TRUE(open_device("auto", {.threads = 1}).ok());
  std::ifstream maps("/proc/self/maps");
  ASSERT_TRUE(maps.is_open());
  for (std::string line; std::getline(maps, line);)
    for (const char* library : {"libvulkan", "libLLVM"})
      EXPECT_EQ(line.find(library), std::string::npos) << line;
}

}  // namespace
}  // namespace thimble
