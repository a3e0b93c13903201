#include "backends/registry.h"

#include "backends/cpu/cpu_device.h"

namespace thimble {

Result<std::shared_ptr<Device>> open_device(const std::string& name, const DeviceOptions& options) {
  if (name == "cpu" || name == "auto" || name.empty()) return open_cpu_device(options.threads);
  return error(Code::kUnsupported, "device \"%s\" is not in this build; it has: " THIMBLE_BACKENDS,
               name.c_str());
}

std::vector<DeviceInfo> list_devices() { return {cpu_device_info()}; }

}  // namespace thimble
