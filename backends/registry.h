// The backends of this build, by name. The only place that knows them all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"

// The backends of this build, for people.
#define THIMBLE_BACKENDS "cpu"

namespace thimble {

struct DeviceOptions {
  uint32_t threads = 0;  // cpu: worker threads; 0: one a core
};

// Opens "auto", "cpu", "cuda", "cuda:1", ...
Result<std::shared_ptr<Device>> open_device(const std::string& name, const DeviceOptions& options);

// What every backend of this build finds on this machine.
std::vector<DeviceInfo> list_devices();

}  // namespace thimble
