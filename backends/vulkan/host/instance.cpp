#include "backends/vulkan/host/instance.h"

#include <cstring>
#include <memory>
#include <vector>

#include "backends/vulkan/host/context.h"
#include "base/system.h"

namespace thimble::vulkan {
namespace {

#ifdef _WIN32
constexpr const char* kLoaders[] = {"vulkan-1.dll"};
#elif defined(__APPLE__)
constexpr const char* kLoaders[] = {"libvulkan.1.dylib", "libMoltenVK.dylib"};
#else
constexpr const char* kLoaders[] = {"libvulkan.so.1", "libvulkan.so"};  // the second name is used on Android
#endif

PFN_vkGetInstanceProcAddr find_loader() {
  for (const char* name : kLoaders)
    if (const SystemLibrary library(name); library)
      return library.function<std::remove_pointer_t<PFN_vkGetInstanceProcAddr>>("vkGetInstanceProcAddr");
  return nullptr;
}

bool has_debug_utils(const Api& vk) {
  uint32_t count = 0;
  vk.EnumerateInstanceExtensionProperties(nullptr, &count, nullptr);
  std::vector<VkExtensionProperties> extensions(count);
  vk.EnumerateInstanceExtensionProperties(nullptr, &count, extensions.data());
  for (const VkExtensionProperties& e : extensions)
    if (std::strcmp(e.extensionName, VK_EXT_DEBUG_UTILS_EXTENSION_NAME) == 0) return true;
  return false;
}

}  // namespace

Result<const Instance*> Instance::get() {
  static const Result<const Instance*> only = []() -> Result<const Instance*> {
    auto instance = std::make_unique<Instance>();
    THIMBLE_TRY(instance->open());
    return instance.release();
  }();
  return only;
}

Status Instance::open() {
  vk.GetInstanceProcAddr = find_loader();
  if (!vk.GetInstanceProcAddr)
    return error(Code::kUnsupported, "this machine has no %s; install a Vulkan driver, or use --device cpu",
                 kLoaders[0]);
#define X(name) vk.name = reinterpret_cast<PFN_vk##name>(vk.GetInstanceProcAddr(VK_NULL_HANDLE, "vk" #name));
  THIMBLE_VULKAN_GLOBAL_FUNCTIONS(X)
#undef X
  uint32_t version = VK_API_VERSION_1_0;
  if (vk.EnumerateInstanceVersion) vk.EnumerateInstanceVersion(&version);
  if (version < VK_API_VERSION_1_2)
    return error(Code::kUnsupported, "%s is of Vulkan %u.%u; Thimble needs 1.2: update the graphics driver",
                 kLoaders[0], VK_API_VERSION_MAJOR(version), VK_API_VERSION_MINOR(version));

  VkApplicationInfo application{.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO,
                                .pApplicationName = "thimble",
                                .apiVersion = VK_API_VERSION_1_2};
  VkInstanceCreateInfo create{.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO,
                              .pApplicationInfo = &application};
  const char* debug_utils = VK_EXT_DEBUG_UTILS_EXTENSION_NAME;
  passes_on_messages = has_debug_utils(vk);
  if (passes_on_messages) {
    create.enabledExtensionCount = 1;
    create.ppEnabledExtensionNames = &debug_utils;
  }
  if (const VkResult r = vk.CreateInstance(&create, nullptr, &handle); r != VK_SUCCESS)
    return error(Code::kUnsupported,
                 "Vulkan does not start: %s; install the driver of your card, or use --device cpu",
                 result_text(r).c_str());
#define X(name) vk.name = reinterpret_cast<PFN_vk##name>(vk.GetInstanceProcAddr(handle, "vk" #name));
  THIMBLE_VULKAN_INSTANCE_FUNCTIONS(X)
#undef X
  return {};
}

}  // namespace thimble::vulkan
