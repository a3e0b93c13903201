// The backends of this build, by name. The only place that knows them all.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"

namespace thimble {

// The backends of this build, for people: "cpu, cuda, vulkan".
const char* backend_names();

struct DeviceOptions {
  uint32_t threads = 0;  // cpu: worker threads; 0: one a core
  // For tests. cuda: nothing but what cards of compute capability 8.0 have; vulkan: but what Vulkan 1.2
  // promises.
  bool portable = false;
  std::function<void(const char*)> messages;  // vulkan: gets what validation layers say, on any thread
};

// Opens "cpu", "cuda" (the first card), "cuda:1", "vulkan", ..., or "auto": the first NVIDIA card that works,
// else the first other one, else the cpu.
Result<std::shared_ptr<Device>> open_device(const std::string& name, const DeviceOptions& options);

// What every backend of this build finds on this machine.
std::vector<DeviceInfo> list_devices();

}  // namespace thimble
