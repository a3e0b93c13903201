// The devices that Vulkan shows, what each can do, and why one cannot be used.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "backends/vulkan/host/instance.h"
#include "backends/vulkan/recording.h"

namespace thimble::vulkan {

struct Gpu {
  VkPhysicalDevice handle = VK_NULL_HANDLE;
  VkPhysicalDeviceType type = VK_PHYSICAL_DEVICE_TYPE_OTHER;
  DeviceInfo info;
  Limits limits;
  std::string refused;  // why it cannot be used; empty: it can
  uint32_t queue_family = 0;
  uint32_t heap = 0;                      // its own memory
  bool sets_subgroup_size = false;        // it has several sizes, and a pipeline asks for one
  bool has_memory_budget = false;         // it tells how much memory is free
  uint64_t max_buffer = 0;                // bytes of a buffer
  uint64_t max_allocation = 0;            // bytes that the driver promises in one piece; some give more
  uint8_t cache_uuid[VK_UUID_SIZE] = {};  // changes with all that makes a pipeline cache useless
};

// The devices in the order of their numbers: those that can be used first, and among them discrete,
// integrated, virtual, software.
std::vector<Gpu> find_gpus(const Instance&);

// Bytes of a device's own memory that are free now.
uint64_t free_gpu_bytes(const Instance&, const Gpu&);
// Bytes of it that this process uses now; none where the driver does not tell.
std::optional<uint64_t> used_gpu_bytes(const Instance&, const Gpu&);

}  // namespace thimble::vulkan
