// Vulkan's functions, loaded at run time. Nothing links libvulkan, so the library also loads on machines
// without it. We use our own table and not volk, because volk's global vkCreateInstance etc. would collide
// with those of a program that links our static library and libvulkan.
#pragma once

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan_core.h>

namespace thimble::vulkan {

// VK_KHR_cooperative_matrix with the numbers of the specification. Headers contain it since 1.3.255, but
// Debian 12 has 1.3.239.
inline constexpr char kCooperativeMatrix[] = "VK_KHR_cooperative_matrix";
struct CooperativeMatrixFeatures {
  VkStructureType sType = static_cast<VkStructureType>(1000506000);
  void* pNext = nullptr;
  VkBool32 cooperativeMatrix = VK_FALSE;
  VkBool32 cooperativeMatrixRobustBufferAccess = VK_FALSE;
};
enum class Component : uint32_t { kF16 = 0, kF32 = 1 };
enum class Scope : uint32_t { kSubgroup = 3 };
// C = A B + C, where A is m x k and B is k x n.
struct CooperativeMatrixProperties {
  VkStructureType sType = static_cast<VkStructureType>(1000506001);
  void* pNext = nullptr;
  uint32_t m = 0, n = 0, k = 0;
  Component a{}, b{}, c{}, result{};
  VkBool32 saturates = VK_FALSE;
  Scope scope{};
};
using PFN_vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR =
    VkResult(VKAPI_PTR*)(VkPhysicalDevice, uint32_t* count, CooperativeMatrixProperties*);

// clang-format off
#define THIMBLE_VULKAN_GLOBAL_FUNCTIONS(X) \
  X(EnumerateInstanceVersion) X(EnumerateInstanceExtensionProperties) X(CreateInstance)
#define THIMBLE_VULKAN_INSTANCE_FUNCTIONS(X) \
  X(DestroyInstance) X(EnumeratePhysicalDevices) X(EnumerateDeviceExtensionProperties) \
  X(GetPhysicalDeviceProperties) X(GetPhysicalDeviceProperties2) X(GetPhysicalDeviceFeatures2) \
  X(GetPhysicalDeviceMemoryProperties) X(GetPhysicalDeviceMemoryProperties2) \
  X(GetPhysicalDeviceQueueFamilyProperties) X(GetPhysicalDeviceCooperativeMatrixPropertiesKHR) X(CreateDevice) \
  X(GetDeviceProcAddr) X(CreateDebugUtilsMessengerEXT) X(DestroyDebugUtilsMessengerEXT)
#define THIMBLE_VULKAN_DEVICE_FUNCTIONS(X) \
  X(DestroyDevice) X(GetDeviceQueue) X(QueueSubmit) X(DeviceWaitIdle) \
  X(AllocateMemory) X(FreeMemory) X(MapMemory) X(CreateBuffer) X(DestroyBuffer) X(GetBufferMemoryRequirements) \
  X(BindBufferMemory) X(CreateSemaphore) X(DestroySemaphore) X(WaitSemaphores) X(GetSemaphoreCounterValue) \
  X(CreateShaderModule) X(DestroyShaderModule) X(CreatePipelineCache) X(DestroyPipelineCache) \
  X(GetPipelineCacheData) X(CreateComputePipelines) X(DestroyPipeline) X(CreatePipelineLayout) \
  X(DestroyPipelineLayout) X(CreateDescriptorSetLayout) X(DestroyDescriptorSetLayout) X(CreateDescriptorPool) \
  X(DestroyDescriptorPool) X(AllocateDescriptorSets) X(UpdateDescriptorSets) X(CreateCommandPool) \
  X(DestroyCommandPool) X(AllocateCommandBuffers) X(BeginCommandBuffer) X(EndCommandBuffer) X(CmdBindPipeline) \
  X(CmdBindDescriptorSets) X(CmdPushConstants) X(CmdDispatch) X(CmdPipelineBarrier) X(CmdCopyBuffer) X(CmdFillBuffer)
// clang-format on

// Call as vk.CreateBuffer(device, ...).
struct Api {
  PFN_vkGetInstanceProcAddr GetInstanceProcAddr = nullptr;
#define X(name) PFN_vk##name name = nullptr;
  THIMBLE_VULKAN_GLOBAL_FUNCTIONS(X)
  THIMBLE_VULKAN_INSTANCE_FUNCTIONS(X)
  THIMBLE_VULKAN_DEVICE_FUNCTIONS(X)
#undef X
};

}  // namespace thimble::vulkan
