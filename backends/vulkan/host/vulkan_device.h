// Every device with a driver for Vulkan 1.2.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "backends/backend.h"

namespace thimble {
namespace vulkan {
class Context;
// `used_before`: what the process used of the device's memory before it opened the context, if the driver
// tells.
Result<std::shared_ptr<Device>> make_device(std::shared_ptr<Context>,
                                            std::optional<uint64_t> used_before = {});
}  // namespace vulkan

// Opens a device by its number in vulkan_device_infos(), `portable` and `messages` as in DeviceOptions.
// Unsupported, saying why, where there is no driver, no such device, or it cannot be used.
Result<std::shared_ptr<Device>> open_vulkan_device(uint32_t index, bool portable,
                                                   const std::function<void(const char*)>& messages);

// The first device, if it can be used and is not software.
Result<std::shared_ptr<Device>> open_vulkan_hardware();

// The devices of this machine, those that cannot be used with the reason in their description; none where
// there is no driver.
std::vector<DeviceInfo> vulkan_device_infos();

}  // namespace thimble
