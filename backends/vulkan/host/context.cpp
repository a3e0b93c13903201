#include "backends/vulkan/host/context.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "backends/vulkan/host/pipelines.h"

namespace thimble::vulkan {

std::string result_text(VkResult r) {
  switch (r) {
    case VK_ERROR_OUT_OF_HOST_MEMORY:
      return "the system is out of memory";
    case VK_ERROR_OUT_OF_DEVICE_MEMORY:
      return "the device is out of memory";
    case VK_ERROR_DEVICE_LOST:
      return "the device was lost";
    case VK_ERROR_INITIALIZATION_FAILED:
      return "the driver could not be initialised";
    case VK_ERROR_INCOMPATIBLE_DRIVER:
      return "no driver was found";
    default:
      return "Vulkan error " + std::to_string(r);
  }
}

static VKAPI_ATTR VkBool32 VKAPI_CALL pass_on(VkDebugUtilsMessageSeverityFlagBitsEXT,
                                              VkDebugUtilsMessageTypeFlagsEXT,
                                              const VkDebugUtilsMessengerCallbackDataEXT* data,
                                              void* messages) {
  (*static_cast<const Messages*>(messages))(data->pMessage);
  return VK_FALSE;
}

Context::Context(const Instance& i, const Gpu& g, Messages m)
    : instance(i), gpu(g), vk(i.vk), messages_(std::move(m)) {}

Context::~Context() {
  if (device) {
    vk.DeviceWaitIdle(device);
    pipelines.reset();
    vk.DestroyDevice(device, nullptr);
  }
  if (messenger_) vk.DestroyDebugUtilsMessengerEXT(instance.handle, messenger_, nullptr);
}

Result<std::shared_ptr<Context>> Context::open(const Instance& instance, const Gpu& gpu, Messages messages) {
  const auto context = std::make_shared<Context>(instance, gpu, std::move(messages));
  THIMBLE_TRY(context->open());
  return context;
}

Status Context::open() {
  if (messages_ && instance.passes_on_messages) {
    const VkDebugUtilsMessengerCreateInfoEXT messenger{
        .sType = VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT,
        .messageSeverity =
            VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT,
        .messageType =
            VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_TYPE_PERFORMANCE_BIT_EXT,
        .pfnUserCallback = pass_on,
        .pUserData = const_cast<Messages*>(&messages_)};
    THIMBLE_TRY(check(vk.CreateDebugUtilsMessengerEXT(instance.handle, &messenger, nullptr, &messenger_),
                      "being opened"));
  }
  const float priority = 1;
  const VkDeviceQueueCreateInfo queues{.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO,
                                       .queueFamilyIndex = gpu.queue_family,
                                       .queueCount = 1,
                                       .pQueuePriorities = &priority};
  VkPhysicalDeviceSubgroupSizeControlFeaturesEXT sizes{
      .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES_EXT,
      .subgroupSizeControl = VK_TRUE};
  CooperativeMatrixFeatures matrices;
  matrices.cooperativeMatrix = VK_TRUE;
  VkPhysicalDeviceVulkan12Features features12{.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES,
                                              .shaderFloat16 = gpu.limits.f16_arithmetic,
                                              .timelineSemaphore = VK_TRUE,
                                              .vulkanMemoryModel = gpu.limits.cooperative_matrix,
                                              .vulkanMemoryModelDeviceScope = gpu.limits.cooperative_matrix};
  std::vector<const char*> extensions;
  if (gpu.sets_subgroup_size) {
    extensions.push_back(VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME);
    sizes.pNext = std::exchange(features12.pNext, &sizes);
  }
  VkPhysicalDeviceShaderIntegerDotProductFeaturesKHR byte_products{
      .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES_KHR,
      .shaderIntegerDotProduct = VK_TRUE};
  if (gpu.limits.byte_products) {
    extensions.push_back(VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME);
    byte_products.pNext = std::exchange(features12.pNext, &byte_products);
  }
  if (gpu.limits.cooperative_matrix) {
    extensions.push_back(kCooperativeMatrix);
    matrices.pNext = std::exchange(features12.pNext, &matrices);
  }
  const VkPhysicalDeviceVulkan11Features features11{
      .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES,
      .pNext = &features12,
      .storageBuffer16BitAccess = gpu.limits.f16_storage};
  const VkDeviceCreateInfo create{.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO,
                                  .pNext = &features11,
                                  .queueCreateInfoCount = 1,
                                  .pQueueCreateInfos = &queues,
                                  .enabledExtensionCount = static_cast<uint32_t>(extensions.size()),
                                  .ppEnabledExtensionNames = extensions.data()};
  if (const VkResult r = vk.CreateDevice(gpu.handle, &create, nullptr, &device); r != VK_SUCCESS) {
    device = VK_NULL_HANDLE;
    return check(r, "being opened");
  }
#define X(name) vk.name = reinterpret_cast<PFN_vk##name>(vk.GetDeviceProcAddr(device, "vk" #name));
  THIMBLE_VULKAN_DEVICE_FUNCTIONS(X)
#undef X
  vk.GetDeviceQueue(device, gpu.queue_family, 0, &queue);
  pipelines = std::make_unique<Pipelines>(*this);
  return pipelines->open();
}

Status Context::check(VkResult r, const char* doing) const {
  const char* name = gpu.info.name.c_str();
  switch (r) {
    case VK_SUCCESS:
      return {};
    case VK_ERROR_OUT_OF_HOST_MEMORY:
    case VK_ERROR_OUT_OF_DEVICE_MEMORY:
      return error(
          Code::kOutOfMemory,
          "%s is out of memory while %s; use a smaller pool or budget, or free other programs' memory", name,
          doing);
    case VK_ERROR_DEVICE_LOST:
      return error(Code::kDeviceLost, "%s was lost while %s; open the model again, or use --device cpu", name,
                   doing);
    default:
      return error(Code::kInternal, "%s failed while %s: %s", name, doing, result_text(r).c_str());
  }
}

void full_barrier(const Api& vk, VkCommandBuffer commands) {
  constexpr VkPipelineStageFlags kAll = VK_PIPELINE_STAGE_ALL_COMMANDS_BIT | VK_PIPELINE_STAGE_HOST_BIT;
  constexpr VkAccessFlags kReadAndWrite = VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT;
  const VkMemoryBarrier barrier{.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                                .srcAccessMask = kReadAndWrite,
                                .dstAccessMask = kReadAndWrite};
  vk.CmdPipelineBarrier(commands, kAll, kAll, 0, 1, &barrier, 0, nullptr, 0, nullptr);
}

Timeline::~Timeline() {
  if (!semaphore_) return;
  static_cast<void>(wait(last_));  // if the device is lost, there is nothing to wait for
  context_->vk.DestroySemaphore(context_->device, semaphore_, nullptr);
}

Status Timeline::open() {
  const VkSemaphoreTypeCreateInfo type{.sType = VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO,
                                       .semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE};
  const VkSemaphoreCreateInfo create{.sType = VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO, .pNext = &type};
  return context_->check(context_->vk.CreateSemaphore(context_->device, &create, nullptr, &semaphore_),
                         "making a semaphore");
}

Status Timeline::submit(std::span<const VkCommandBuffer> commands) {
  const uint64_t value = last_ + 1;
  const VkTimelineSemaphoreSubmitInfo values{.sType = VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO,
                                             .signalSemaphoreValueCount = 1,
                                             .pSignalSemaphoreValues = &value};
  const VkSubmitInfo submit{.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO,
                            .pNext = &values,
                            .commandBufferCount = static_cast<uint32_t>(commands.size()),
                            .pCommandBuffers = commands.data(),
                            .signalSemaphoreCount = 1,
                            .pSignalSemaphores = &semaphore_};
  const std::lock_guard lock(context_->queue_mutex);
  THIMBLE_TRY(context_->check(context_->vk.QueueSubmit(context_->queue, 1, &submit, VK_NULL_HANDLE),
                              "starting work"));
  last_ = value;
  return {};
}

Status Timeline::wait(uint64_t submit) {
  if (submit <= done_) return {};
  // A sleeping thread wakes up 0.1 to 0.2 ms after the work is done, which is 5 % of the time of a token on
  // an H200 (284 to 289 tokens/s instead of 303). So the thread first polls for as long as a token takes on
  // such cards. On a software device it sleeps at once, because the work needs the processor.
  if (!context_->gpu.info.software) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(10);
    uint64_t done = 0;
    while (context_->vk.GetSemaphoreCounterValue(context_->device, semaphore_, &done) == VK_SUCCESS &&
           done < submit && std::chrono::steady_clock::now() < until)
      std::this_thread::yield();
  }
  const VkSemaphoreWaitInfo info{.sType = VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO,
                                 .semaphoreCount = 1,
                                 .pSemaphores = &semaphore_,
                                 .pValues = &submit};
  THIMBLE_TRY(context_->check(context_->vk.WaitSemaphores(context_->device, &info, UINT64_MAX), "working"));
  done_ = std::max(done_, submit);
  return {};
}

}  // namespace thimble::vulkan
