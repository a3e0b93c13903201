// What a device can do at most: the rates that speeds are given as shares of.
#pragma once

#include "backends/backend.h"

namespace thimble::vulkan {

// About a second, and up to 2 GiB of the device's memory, which are free again afterwards.
Result<Rates> measure_rates(Device&, const DeviceInfo&);

}  // namespace thimble::vulkan
