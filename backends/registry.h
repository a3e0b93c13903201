// The backends of this build, by name. The only place that knows them all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"

namespace thimble {

// The backends of this build, for people: "cpu, cuda".
const char* backend_names();

struct DeviceOptions {
  uint32_t threads = 0;   // cpu: worker threads; 0: one a core
  bool portable = false;  // cuda: nothing but what cards of compute capability 8.0 have; for tests
};

// Opens "cpu", "cuda" (the first card), "cuda:1", ..., or "auto": the first card that works, else the cpu.
Result<std::shared_ptr<Device>> open_device(const std::string& name, const DeviceOptions& options);

// What every backend of this build finds on this machine.
std::vector<DeviceInfo> list_devices();

}  // namespace thimble
