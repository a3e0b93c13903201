#include "backends/vulkan/host/gpu.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/bits.h"
#include "base/system.h"

namespace thimble::vulkan {
namespace {

constexpr VkSubgroupFeatureFlags kSubgroupOps =
    VK_SUBGROUP_FEATURE_BASIC_BIT | VK_SUBGROUP_FEATURE_ARITHMETIC_BIT | VK_SUBGROUP_FEATURE_BALLOT_BIT |
    VK_SUBGROUP_FEATURE_SHUFFLE_BIT;

class Extensions {
 public:
  Extensions(const Api& vk, VkPhysicalDevice device) {
    uint32_t count = 0;
    vk.EnumerateDeviceExtensionProperties(device, nullptr, &count, nullptr);
    list_.resize(count);
    vk.EnumerateDeviceExtensionProperties(device, nullptr, &count, list_.data());
  }
  bool has(const char* name) const {
    return std::any_of(list_.begin(), list_.end(), [&](const VkExtensionProperties& e) {
      return std::strcmp(e.extensionName, name) == 0;
    });
  }

 private:
  std::vector<VkExtensionProperties> list_;
};

std::string version_text(uint32_t version) {
  return std::to_string(VK_API_VERSION_MAJOR(version)) + "." + std::to_string(VK_API_VERSION_MINOR(version));
}

// The largest heap of the device's own memory.
uint32_t device_heap(const VkPhysicalDeviceMemoryProperties& memory) {
  uint32_t best = 0;
  const auto rank = [&](uint32_t heap) {
    const VkMemoryHeap& h = memory.memoryHeaps[heap];
    return std::pair(h.flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT, h.size);
  };
  for (uint32_t heap = 1; heap < memory.memoryHeapCount; ++heap)
    if (rank(heap) > rank(best)) best = heap;
  return best;
}

// A queue family for compute. A compute-only family is preferred, because it leaves the other queue to the
// desktop.
std::optional<uint32_t> compute_family(const Api& vk, VkPhysicalDevice device) {
  uint32_t count = 0;
  vk.GetPhysicalDeviceQueueFamilyProperties(device, &count, nullptr);
  std::vector<VkQueueFamilyProperties> families(count);
  vk.GetPhysicalDeviceQueueFamilyProperties(device, &count, families.data());
  std::optional<uint32_t> found;
  for (uint32_t i = 0; i < count; ++i) {
    const VkQueueFlags flags = families[i].queueFlags;
    if (!(flags & VK_QUEUE_COMPUTE_BIT)) continue;
    if (!(flags & VK_QUEUE_GRAPHICS_BIT)) return i;
    if (!found) found = i;
  }
  return found;
}

// Whether subgroups can multiply 16 x 16 matrices of f16 and accumulate in f32, as the shaders do.
bool multiplies_f16(const Api& vk, VkPhysicalDevice device) {
  uint32_t count = 0;
  if (!vk.GetPhysicalDeviceCooperativeMatrixPropertiesKHR ||
      vk.GetPhysicalDeviceCooperativeMatrixPropertiesKHR(device, &count, nullptr) != VK_SUCCESS)
    return false;
  std::vector<CooperativeMatrixProperties> kinds(count);
  if (vk.GetPhysicalDeviceCooperativeMatrixPropertiesKHR(device, &count, kinds.data()) != VK_SUCCESS)
    return false;
  return std::any_of(kinds.begin(), kinds.end(), [](const CooperativeMatrixProperties& p) {
    return p.m == 16 && p.n == 16 && p.k == 16 && p.a == Component::kF16 && p.b == Component::kF16 &&
           p.c == Component::kF32 && p.result == Component::kF32 && p.scope == Scope::kSubgroup;
  });
}

// Rates of the slow devices of each kind: a phone, a core or two of a processor, a card. The memory of cards
// has grown like their speed: a card of 2016 with 4 GiB reaches 2 TFLOP/s, a card with 80 GiB reaches 60.
void expect_of_kind(const Gpu& gpu, Limits& l) {
  const double gib = static_cast<double>(gpu.info.total_bytes) * 0x1p-30;
  const bool card = gpu.type == VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU;
  const bool software = gpu.type == VK_PHYSICAL_DEVICE_TYPE_CPU;
  l.operations_per_second = card ? std::clamp(0.5e12 * gib, 2e12, 20e12) : software ? 8e9 : 0.4e12;
  l.bytes_per_second = card ? 200e9 : software ? 5e9 : 20e9;
}

// Fills in everything except the number. Missing features are written to gpu.refused.
void examine(const Api& vk, Gpu& gpu) {
  VkPhysicalDeviceProperties basics;
  vk.GetPhysicalDeviceProperties(gpu.handle, &basics);
  gpu.info.description = basics.deviceName;
  if (basics.apiVersion < VK_API_VERSION_1_2) {
    gpu.refused =
        "its driver supports only Vulkan " + version_text(basics.apiVersion) + ", but 1.2 is needed";
    return;
  }

  const Extensions extensions(vk, gpu.handle);
  const bool has_size_control = extensions.has(VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME);
  gpu.has_memory_budget = extensions.has(VK_EXT_MEMORY_BUDGET_EXTENSION_NAME);
  VkPhysicalDeviceSubgroupSizeControlPropertiesEXT sizes{
      .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES_EXT};
  VkPhysicalDeviceMaintenance4PropertiesKHR buffers{
      .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_4_PROPERTIES_KHR};
  VkPhysicalDeviceVulkan12Properties driver{.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_PROPERTIES};
  VkPhysicalDeviceVulkan11Properties subgroups{
      .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES, .pNext = &driver};
  VkPhysicalDeviceProperties2 properties{.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2,
                                         .pNext = &subgroups};
  if (has_size_control) driver.pNext = &sizes;
  const bool has_buffer_size = extensions.has(VK_KHR_MAINTENANCE_4_EXTENSION_NAME);
  if (has_buffer_size) {
    buffers.pNext = driver.pNext;
    driver.pNext = &buffers;
  }
  vk.GetPhysicalDeviceProperties2(gpu.handle, &properties);

  VkPhysicalDeviceSubgroupSizeControlFeaturesEXT size_control{
      .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES_EXT};
  CooperativeMatrixFeatures matrices;
  VkPhysicalDeviceVulkan12Features features12{.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES,
                                              .pNext = has_size_control ? &size_control : nullptr};
  VkPhysicalDeviceShaderIntegerDotProductFeaturesKHR byte_products{
      .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES_KHR};
  if (extensions.has(VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME)) {
    byte_products.pNext = features12.pNext;
    features12.pNext = &byte_products;
  }
  if (extensions.has(kCooperativeMatrix)) {
    matrices.pNext = features12.pNext;
    features12.pNext = &matrices;
  }
  VkPhysicalDeviceVulkan11Features features11{.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES,
                                              .pNext = &features12};
  VkPhysicalDeviceFeatures2 features{.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2,
                                     .pNext = &features11};
  vk.GetPhysicalDeviceFeatures2(gpu.handle, &features);

  const VkPhysicalDeviceLimits& l = basics.limits;
  gpu.type = basics.deviceType;
  gpu.sets_subgroup_size = has_size_control && size_control.subgroupSizeControl &&
                           (sizes.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT) &&
                           sizes.minSubgroupSize < sizes.maxSubgroupSize;
  gpu.max_allocation = subgroups.maxMemoryAllocationSize;
  gpu.max_buffer = has_buffer_size ? buffers.maxBufferSize : gpu.max_allocation;
  std::memcpy(gpu.cache_uuid, basics.pipelineCacheUUID, sizeof gpu.cache_uuid);
  gpu.limits = {.subgroup_size = subgroups.subgroupSize,
                .max_group_threads = std::min(l.maxComputeWorkGroupInvocations, l.maxComputeWorkGroupSize[0]),
                .max_shared_bytes = l.maxComputeSharedMemorySize,
                .max_groups = *std::min_element(l.maxComputeWorkGroupCount, l.maxComputeWorkGroupCount + 3),
                .offset_alignment = static_cast<uint32_t>(l.minStorageBufferOffsetAlignment),
                .max_range = l.maxStorageBufferRange,
                .f16_storage = features11.storageBuffer16BitAccess == VK_TRUE,
                .f16_arithmetic = features12.shaderFloat16 == VK_TRUE,
                .byte_products = byte_products.shaderIntegerDotProduct == VK_TRUE};
  gpu.limits.half_subnormals = driver.shaderDenormPreserveFloat16 || !driver.shaderDenormFlushToZeroFloat16;
  gpu.limits.cooperative_matrix = gpu.limits.f16_storage && gpu.limits.f16_arithmetic &&
                                  features12.vulkanMemoryModel && features12.vulkanMemoryModelDeviceScope &&
                                  matrices.cooperativeMatrix && multiplies_f16(vk, gpu.handle);

  VkPhysicalDeviceMemoryProperties memory;
  vk.GetPhysicalDeviceMemoryProperties(gpu.handle, &memory);
  gpu.heap = device_heap(memory);
  gpu.info.total_bytes = memory.memoryHeaps[gpu.heap].size;
  expect_of_kind(gpu, gpu.limits);
  gpu.info.max_binding = gpu.limits.max_range;
  gpu.info.max_allocation = std::min(gpu.max_allocation, gpu.max_buffer);
  gpu.info.alignment = 256;         // of every descriptor (offset_alignment is at most 256)
  gpu.info.granularity = 64 << 10;  // page size of discrete cards; NVIDIA, AMD and Intel round up to it
  gpu.info.unified = false;
  gpu.info.software = gpu.type == VK_PHYSICAL_DEVICE_TYPE_CPU;
  gpu.info.view_element_bytes = 2;
  gpu.info.description += std::string(", ") + driver.driverName + " " + driver.driverInfo + ", Vulkan " +
                          version_text(basics.apiVersion) + ", subgroups of " +
                          std::to_string(gpu.limits.subgroup_size) + ", bindings of " +
                          std::to_string((gpu.limits.max_range + (1 << 19)) >> 20) + " MiB" +
                          (gpu.limits.f16_arithmetic ? ", f16" : "") +
                          (gpu.limits.cooperative_matrix ? ", cooperative matrices" : "");

  const std::optional<uint32_t> family = compute_family(vk, gpu.handle);
  gpu.queue_family = family.value_or(0);
  const uint32_t lanes = gpu.limits.subgroup_size;
  if (!family)
    gpu.refused = "it has no compute queue";
  else if (!features12.timelineSemaphore)
    gpu.refused = "it has no timeline semaphores";
  else if (!(subgroups.subgroupSupportedStages & VK_SHADER_STAGE_COMPUTE_BIT) ||
           (subgroups.subgroupSupportedOperations & kSubgroupOps) != kSubgroupOps)
    gpu.refused = "its subgroups cannot add, compare, vote and exchange";
  else if (lanes < 4 || lanes > 128 || !std::has_single_bit(lanes))
    gpu.refused = "its subgroups have " + std::to_string(lanes) + " lanes, 4 to 128 are supported";
  else if (l.maxPerStageDescriptorStorageBuffers <= kMostOperands ||
           l.maxDescriptorSetStorageBuffers <= kMostOperands)
    gpu.refused = "a shader sees " + std::to_string(l.maxPerStageDescriptorStorageBuffers) + " buffers, " +
                  std::to_string(kMostOperands + 1) + " are needed";
}

// Lower is better.
int rank(const Gpu& gpu) {
  if (!gpu.refused.empty()) return 4;
  switch (gpu.type) {
    case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:
      return 0;
    case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU:
      return 1;
    case VK_PHYSICAL_DEVICE_TYPE_CPU:
      return 3;
    default:
      return 2;
  }
}

}  // namespace

std::vector<Gpu> find_gpus(const Instance& instance) {
  const Api& vk = instance.vk;
  uint32_t count = 0;
  vk.EnumeratePhysicalDevices(instance.handle, &count, nullptr);
  std::vector<VkPhysicalDevice> handles(count);
  if (vk.EnumeratePhysicalDevices(instance.handle, &count, handles.data()) < 0) return {};
  std::vector<Gpu> gpus(count);
  for (uint32_t i = 0; i < count; ++i) {
    gpus[i].handle = handles[i];
    examine(vk, gpus[i]);
  }
  std::stable_sort(gpus.begin(), gpus.end(), [](const Gpu& a, const Gpu& b) { return rank(a) < rank(b); });
  for (uint32_t i = 0; i < count; ++i) {
    Gpu& gpu = gpus[i];
    gpu.info.name = "vulkan:" + std::to_string(i);
    gpu.info.usable = gpu.refused.empty();
    if (gpu.info.usable)
      gpu.info.free_bytes = free_gpu_bytes(instance, gpu);
    else
      gpu.info.description += "; cannot be used: " + gpu.refused;
  }
  return gpus;
}

static VkPhysicalDeviceMemoryBudgetPropertiesEXT memory_budget(const Instance& instance, const Gpu& gpu) {
  VkPhysicalDeviceMemoryBudgetPropertiesEXT budget{
      .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT};
  VkPhysicalDeviceMemoryProperties2 memory{.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2,
                                           .pNext = &budget};
  instance.vk.GetPhysicalDeviceMemoryProperties2(gpu.handle, &memory);
  return budget;
}

uint64_t free_gpu_bytes(const Instance& instance, const Gpu& gpu) {
  if (gpu.has_memory_budget) {
    const VkPhysicalDeviceMemoryBudgetPropertiesEXT budget = memory_budget(instance, gpu);
    const uint64_t most = budget.heapBudget[gpu.heap];
    return most - std::min<uint64_t>(budget.heapUsage[gpu.heap], most);
  }
  // The free memory of a card is unknown. For shared memory, the operating system reports it.
  if (gpu.type == VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU) return gpu.info.total_bytes;
  return std::min(gpu.info.total_bytes, memory_status().free_bytes);
}

std::optional<uint64_t> used_gpu_bytes(const Instance& instance, const Gpu& gpu) {
  if (!gpu.has_memory_budget) return std::nullopt;
  return memory_budget(instance, gpu).heapUsage[gpu.heap];
}

}  // namespace thimble::vulkan
