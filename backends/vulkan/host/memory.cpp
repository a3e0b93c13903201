#include "backends/vulkan/host/memory.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <optional>

#include "base/bits.h"

namespace thimble::vulkan {
namespace {

constexpr VkMemoryPropertyFlags kDeviceLocal = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
constexpr VkMemoryPropertyFlags kMapped =
    VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;

// Chooses one of the memory types that a buffer can use. The type must have all needed properties. A type
// with all wished properties is preferred, then a type in a larger heap.
std::optional<uint32_t> memory_type(const Context& c, uint32_t possible, VkMemoryPropertyFlags needed,
                                    VkMemoryPropertyFlags wished) {
  VkPhysicalDeviceMemoryProperties memory;
  c.vk.GetPhysicalDeviceMemoryProperties(c.gpu.handle, &memory);
  const auto rank = [&](uint32_t type) {
    const VkMemoryType& t = memory.memoryTypes[type];
    return std::pair((t.propertyFlags & wished) == wished, memory.memoryHeaps[t.heapIndex].size);
  };
  std::optional<uint32_t> best;
  for (uint32_t type = 0; type < memory.memoryTypeCount; ++type) {
    if (!(possible >> type & 1) || (memory.memoryTypes[type].propertyFlags & needed) != needed) continue;
    if (!best || rank(type) > rank(*best)) best = type;
  }
  return best;
}

}  // namespace

VulkanBuffer::~VulkanBuffer() {
  context->vk.DestroyBuffer(context->device, handle, nullptr);
  context->vk.FreeMemory(context->device, memory, nullptr);
}

Result<std::unique_ptr<VulkanBuffer>> allocate(const std::shared_ptr<Context>& context, Place place,
                                               uint64_t bytes) {
  const Context& c = *context;
  auto buffer = std::make_unique<VulkanBuffer>(context);
  buffer->size = bytes;
  const uint64_t size = round_up(std::max<uint64_t>(bytes, 1), 16);
  if (place != Place::kHost && size > c.gpu.info.total_bytes)
    return error(Code::kOutOfMemory,
                 "%s has %" PRIu64 " MiB of memory, and %" PRIu64
                 " MiB are needed in one piece; use a smaller pool or model",
                 c.gpu.info.name.c_str(), c.gpu.info.total_bytes >> 20, size >> 20);
  if (size > c.gpu.max_buffer)
    return error(Code::kUnsupported,
                 "%s has buffers of at most %" PRIu64 " MiB, and %" PRIu64
                 " MiB are needed in one; use a smaller pool or model, or --device cpu",
                 c.gpu.info.name.c_str(), c.gpu.max_buffer >> 20, size >> 20);
  const VkBufferCreateInfo create{.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO,
                                  .size = size,
                                  .usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT |
                                           VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                                           VK_BUFFER_USAGE_TRANSFER_DST_BIT};
  THIMBLE_TRY(c.check(c.vk.CreateBuffer(c.device, &create, nullptr, &buffer->handle), "making a buffer"));
  VkMemoryRequirements needed;
  c.vk.GetBufferMemoryRequirements(c.device, buffer->handle, &needed);
  VkMemoryPropertyFlags wished = kDeviceLocal;
  if (place == Place::kHost) wished = VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
  const std::optional<uint32_t> type =
      memory_type(c, needed.memoryTypeBits, place == Place::kDevice ? kDeviceLocal : kMapped, wished);
  if (!type)
    return error(Code::kUnsupported, "%s has no memory that %s reaches; use --device cpu",
                 c.gpu.info.name.c_str(), place == Place::kDevice ? "a shader" : "the host");
  const VkMemoryAllocateInfo info{.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO,
                                  .allocationSize = needed.size,
                                  .memoryTypeIndex = *type};
  const VkResult allocated = c.vk.AllocateMemory(c.device, &info, nullptr, &buffer->memory);
  if (allocated != VK_SUCCESS && needed.size > c.gpu.max_allocation)
    return error(Code::kOutOfMemory,
                 "%s gives at most %" PRIu64 " MiB in one piece, and %" PRIu64
                 " MiB are needed; use a smaller pool or model, or --device cpu",
                 c.gpu.info.name.c_str(), c.gpu.max_allocation >> 20, needed.size >> 20);
  THIMBLE_TRY(c.check(allocated, "allocating memory"));
  THIMBLE_TRY(c.check(c.vk.BindBufferMemory(c.device, buffer->handle, buffer->memory, 0), "binding memory"));
  if (place != Place::kDevice)
    THIMBLE_TRY(c.check(c.vk.MapMemory(c.device, buffer->memory, 0, VK_WHOLE_SIZE, 0, &buffer->mapped),
                        "mapping memory"));
  return buffer;
}

Staging::~Staging() {
  const Context& c = *timeline_.context();
  static_cast<void>(finish());
  c.vk.DestroyCommandPool(c.device, pool_, nullptr);
}

Status Staging::open() {
  const Context& c = *timeline_.context();
  THIMBLE_TRY(timeline_.open());
  const VkCommandPoolCreateInfo pool{.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
                                     .flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
                                     .queueFamilyIndex = c.gpu.queue_family};
  THIMBLE_TRY(c.check(c.vk.CreateCommandPool(c.device, &pool, nullptr, &pool_), "making a command pool"));
  const VkCommandBufferAllocateInfo info{.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
                                         .commandPool = pool_,
                                         .level = VK_COMMAND_BUFFER_LEVEL_PRIMARY,
                                         .commandBufferCount = 2};
  THIMBLE_TRY(c.check(c.vk.AllocateCommandBuffers(c.device, &info, commands_), "making command buffers"));
  THIMBLE_LET(memory, allocate(timeline_.context(), Place::kHost, 2 * kBytes));
  memory_ = std::move(memory);
  return {};
}

template <typename Record>
Status Staging::submit(uint32_t half, const Record& record) {
  const Context& c = *timeline_.context();
  VkCommandBuffer commands = commands_[half];
  const VkCommandBufferBeginInfo begin{.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
                                       .flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT};
  THIMBLE_TRY(c.check(c.vk.BeginCommandBuffer(commands, &begin), "moving memory"));
  full_barrier(c.vk, commands);
  record(commands);
  full_barrier(c.vk, commands);
  THIMBLE_TRY(c.check(c.vk.EndCommandBuffer(commands), "moving memory"));
  THIMBLE_TRY(timeline_.submit({&commands, 1}));
  submitted_[half] = timeline_.last();
  return {};
}

static VkBuffer handle_of(const View& v) { return static_cast<const VulkanBuffer*>(v.buffer)->handle; }

Status Staging::write(const View& to, const std::byte* from) {
  const std::lock_guard lock(mutex_);
  uint32_t half = 0;
  for (uint64_t at = 0; at < to.bytes; at += kBytes, half ^= 1) {
    const uint64_t n = std::min(kBytes, to.bytes - at), piece = half * kBytes;
    THIMBLE_TRY(timeline_.wait(submitted_[half]));
    std::memcpy(static_cast<std::byte*>(memory_->mapped) + piece, from + at, n);
    THIMBLE_TRY(submit(half, [&](VkCommandBuffer commands) {
      const VkBufferCopy region{piece, to.offset + at, n};
      timeline_.context()->vk.CmdCopyBuffer(commands, memory_->handle, handle_of(to), 1, &region);
    }));
  }
  return finish();
}

Status Staging::read(std::byte* to, const View& from) {
  const std::lock_guard lock(mutex_);
  for (uint64_t at = 0; at < from.bytes; at += kBytes) {
    const uint64_t n = std::min(kBytes, from.bytes - at);
    THIMBLE_TRY(submit(0, [&](VkCommandBuffer commands) {
      const VkBufferCopy region{from.offset + at, 0, n};
      timeline_.context()->vk.CmdCopyBuffer(commands, handle_of(from), memory_->handle, 1, &region);
    }));
    THIMBLE_TRY(finish());
    std::memcpy(to + at, memory_->mapped, n);
  }
  return {};
}

Status Staging::copy(const View& to, const View& from) {
  if (!to.bytes) return {};
  const std::lock_guard lock(mutex_);
  THIMBLE_TRY(submit(0, [&](VkCommandBuffer commands) {
    const VkBufferCopy region{from.offset, to.offset, to.bytes};
    timeline_.context()->vk.CmdCopyBuffer(commands, handle_of(from), handle_of(to), 1, &region);
  }));
  return finish();
}

Status Staging::clear(VulkanBuffer& buffer) {
  const std::lock_guard lock(mutex_);
  THIMBLE_TRY(submit(0, [&](VkCommandBuffer commands) {
    timeline_.context()->vk.CmdFillBuffer(commands, buffer.handle, 0, VK_WHOLE_SIZE, 0);
  }));
  return finish();
}

}  // namespace thimble::vulkan
