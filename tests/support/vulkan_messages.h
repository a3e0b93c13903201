// Puts every Vulkan device of a test program under the Khronos validation layer with synchronisation
// validation, and fails the running test on anything that it says. VK_INSTANCE_LAYERS= in the environment
// switches it off, to look at one thing alone.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "backends/registry.h"

namespace thimble::test {

inline const bool kUnderValidation = [] {
  setenv("VK_INSTANCE_LAYERS", "VK_LAYER_KHRONOS_validation", 0);
  setenv("VK_LAYER_ENABLES", "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT", 0);
  return true;
}();

// These options, and a message is a failure.
inline DeviceOptions strictly(DeviceOptions options = {}) {
  options.messages = [](const char* message) { ADD_FAILURE() << message; };
  return options;
}

}  // namespace thimble::test
