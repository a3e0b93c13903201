#include "backends/registry.h"

#include <charconv>
#include <optional>
#include <string_view>

#include "backends/cpu/host/cpu_device.h"
#include "backends/cpu/host/cpu_host.h"
#ifdef THIMBLE_CUDA
#include "backends/cuda/host/cuda_device.h"
#endif
#ifdef THIMBLE_VULKAN
#include "backends/vulkan/host/vulkan_device.h"
#include "base/system.h"
#endif

namespace thimble {

const char* backend_names() {
  return "cpu"
#ifdef THIMBLE_CUDA
         ", cuda"
#endif
#ifdef THIMBLE_VULKAN
         ", vulkan"
#endif
      ;
}

// The number in "cuda:1", or 0 in "cuda". Empty if the name is neither.
[[maybe_unused]] static std::optional<uint32_t> device_number(std::string_view name,
                                                              std::string_view backend) {
  if (!name.starts_with(backend)) return std::nullopt;
  name.remove_prefix(backend.size());
  if (name.empty()) return 0;
  uint32_t number = 0;
  const auto [end, failed] = std::from_chars(name.data() + 1, name.data() + name.size(), number);
  if (name[0] != ':' || failed != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return number;
}

static Result<std::shared_ptr<Device>> open_backend(const std::string& name, const DeviceOptions& options) {
  const bool any = name == "auto" || name.empty();
#ifdef THIMBLE_CUDA
  if (any)
    for (uint32_t i = 0; i < cuda_device_infos().size(); ++i)
      if (auto card = open_cuda_device(i, options.portable); card.ok()) return card;
  if (const auto card = device_number(name, "cuda")) return open_cuda_device(*card, options.portable);
#endif
#ifdef THIMBLE_VULKAN
  // Looking for a card loads every driver, including a software driver of 60 MiB.
  if (any && has_graphics_device())
    if (auto card = open_vulkan_hardware(); card.ok()) return card;
  if (const auto card = device_number(name, "vulkan"))
    return open_vulkan_device(*card, options.portable, options.messages);
#endif
  if (name == "cpu" || any) return open_cpu_device(options.threads);
  return error(Code::kUnsupported, "device \"%s\" is not in this build; it has: %s", name.c_str(),
               backend_names());
}

Result<std::shared_ptr<Device>> open_device(const std::string& name, const DeviceOptions& options) {
  THIMBLE_LET(device, open_backend(name, options));
  if (!device->host) device->host = make_host(options.threads);
  return device;
}

std::vector<DeviceInfo> list_devices() {
  std::vector<DeviceInfo> devices{cpu_device_info()};
#ifdef THIMBLE_CUDA
  for (DeviceInfo& card : cuda_device_infos()) devices.push_back(std::move(card));
#endif
#ifdef THIMBLE_VULKAN
  for (DeviceInfo& card : vulkan_device_infos()) devices.push_back(std::move(card));
#endif
  return devices;
}

}  // namespace thimble
