// Vulkan on this machine: its loader and an instance.
#pragma once

#include "backends/vulkan/host/api.h"
#include "base/status.h"

namespace thimble::vulkan {

class Instance {
 public:
  // The instance of this process. It is created at the first call and never destroyed, because NVIDIA's
  // driver is no longer found after it was loaded and unloaded some tens of times. Unsupported, with the
  // reason, if there is no Vulkan 1.2.
  static Result<const Instance*> get();

  VkInstance handle = VK_NULL_HANDLE;
  Api vk;                           // without device functions
  bool passes_on_messages = false;  // of validation layers

 private:
  Status open();
};

}  // namespace thimble::vulkan
