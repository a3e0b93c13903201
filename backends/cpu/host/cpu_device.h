// The CPU backend: plain, threaded, and the definition of what every op computes.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace thimble {

Result<std::shared_ptr<Device>> open_cpu_device(uint32_t threads);
DeviceInfo cpu_device_info();

}  // namespace thimble
