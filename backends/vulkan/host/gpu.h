// The devices that Vulkan lists, the features of each, and why a device cannot be used.
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
  std::string refused;  // why it cannot be used; empty if it can
  uint32_t queue_family = 0;
  uint32_t heap = 0;                // its own memory
  bool sets_subgroup_size = false;  // it supports several subgroup sizes, and a pipeline can choose one
  bool has_memory_budget = false;   // the driver reports how much memory is free
  uint64_t max_buffer = 0;          // largest buffer in bytes
  // Largest allocation that the driver guarantees, in bytes; some drivers allow more.
  uint64_t max_allocation = 0;
  uint8_t cache_uuid[VK_UUID_SIZE] = {};  // changes when a pipeline cache becomes invalid
};

// The devices in the order of their numbers. Usable devices come first; among these, discrete, integrated,
// virtual, software.
std::vector<Gpu> find_gpus(const Instance&);

// Free bytes of a device's own memory.
uint64_t free_gpu_bytes(const Instance&, const Gpu&);
// Bytes of its own memory that this process uses. Empty if the driver does not report it.
std::optional<uint64_t> used_gpu_bytes(const Instance&, const Gpu&);

}  // namespace thimble::vulkan
