// NVIDIA cards with compute capability 8.0 or higher.
#pragma once

#include <memory>
#include <vector>

#include "backends/backend.h"

namespace thimble {

// Opens a card by its number in cuda_device_infos(). `portable` is as in DeviceOptions. Unsupported, with the
// reason, if there is no driver, no such card, or this build has no kernels for it.
Result<std::shared_ptr<Device>> open_cuda_device(uint32_t index, bool portable);

// The cards of this machine. Empty without a driver.
std::vector<DeviceInfo> cuda_device_infos();

}  // namespace thimble
