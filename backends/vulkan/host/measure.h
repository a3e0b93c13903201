// Measures the peak rates of a device. Speeds are reported as shares of these.
#pragma once

#include "backends/backend.h"

namespace thimble::vulkan {

// Takes about a second and up to 2 GiB of the device's memory, which are freed afterwards.
Result<Rates> measure_rates(Device&, const DeviceInfo&);

}  // namespace thimble::vulkan
