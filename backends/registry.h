// The backends of this build, by name. No other code names them all.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"

namespace thimble {

// The names of the backends in this build, for messages: "cpu, cuda, vulkan".
const char* backend_names();

struct DeviceOptions {
  uint32_t threads = 0;  // of the host; 0: one per core, for a card at most 16
  // For tests. cuda: uses only features of compute capability 8.0. vulkan: uses only what Vulkan 1.2
  // guarantees.
  bool portable = false;
  // Vulkan: receives messages of the validation layers, on any thread
  std::function<void(const char*)> messages;
};

// Opens "cpu", "cuda" (the first card), "cuda:1", "vulkan", ..., or "auto": the first usable NVIDIA card,
// else the first other usable card, else the CPU.
Result<std::shared_ptr<Device>> open_device(const std::string& name, const DeviceOptions& options);

// All devices that the backends of this build find on this machine.
std::vector<DeviceInfo> list_devices();

}  // namespace thimble
