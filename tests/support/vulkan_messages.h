// Runs every Vulkan device of a test program under the Khronos validation layer with synchronisation
// validation, and fails the running test on any message. VK_INSTANCE_LAYERS= in the environment disables the
// layer, for debugging.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "backends/registry.h"

namespace thimble::test {

#ifndef _WIN32  // on Windows these tests run only on the CPU
inline const bool kUnderValidation = [] {
  setenv("VK_INSTANCE_LAYERS", "VK_LAYER_KHRONOS_validation", 0);
  setenv("VK_LAYER_ENABLES", "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT", 0);
  return true;
}();
#endif

// Whether a message comes from a validation layer older than 1.3.255 that does not know cooperative matrices:
// extension and feature of the device; capability, extension and specialisation of a shader.
inline bool is_ignorance(const char* message) {
  for (const char* words :
       {"VK_KHR_cooperative_matrix is not supported by this layer", "unknown VkStructureType (1000506000)",
        "Invalid capability operand: 6022", "(Unhandled OpCapability)", "(SPV_KHR_cooperative_matrix)",
        "apply specialization constants with spirv-opt but failed"})
    if (std::strstr(message, words)) return true;
  return false;
}

// The given options, with messages reported as failures.
inline DeviceOptions strictly(DeviceOptions options = {}) {
  options.messages = [](const char* message) {
    if (!is_ignorance(message)) ADD_FAILURE() << message;
  };
  return options;
}

}  // namespace thimble::test
