// The Vulkan of this machine: its loader and an instance.
#pragma once

#include "backends/vulkan/host/api.h"
#include "base/status.h"

namespace thimble::vulkan {

class Instance {
 public:
  // The instance of this process, made when it is first asked for and never destroyed: NVIDIA's driver,
  // loaded and unloaded some tens of times, is not found any more. Unsupported, saying why, where there is no
  // Vulkan 1.2.
  static Result<const Instance*> get();

  VkInstance handle = VK_NULL_HANDLE;
  Api vk;                           // without the functions of a device
  bool passes_on_messages = false;  // of validation layers

 private:
  Status open();
};

}  // namespace thimble::vulkan
