// All devices with a driver for Vulkan 1.2.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "backends/backend.h"

namespace thimble {
namespace vulkan {
class Context;
// `used_before` is the device memory that the process used before it opened the context, if the driver
// reports it.
Result<std::shared_ptr<Device>> make_device(std::shared_ptr<Context>,
                                            std::optional<uint64_t> used_before = {});
}  // namespace vulkan

// Opens a device by its number in vulkan_device_infos(). `portable` and `messages` are as in DeviceOptions.
// Unsupported, with the reason, if there is no driver, no such device, or it cannot be used.
Result<std::shared_ptr<Device>> open_vulkan_device(uint32_t index, bool portable,
                                                   const std::function<void(const char*)>& messages);

// The first device, if it is usable and not a software device.
Result<std::shared_ptr<Device>> open_vulkan_hardware();

// The devices of this machine. The description of an unusable device contains the reason. Empty without a
// driver.
std::vector<DeviceInfo> vulkan_device_infos();

}  // namespace thimble
