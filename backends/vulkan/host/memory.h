// Device memory and memory that the host reaches, and what carries bytes between host and device.
#pragma once

#include <memory>
#include <mutex>

#include "backends/backend.h"
#include "backends/vulkan/host/context.h"

namespace thimble::vulkan {

struct VulkanBuffer : Buffer {
  explicit VulkanBuffer(std::shared_ptr<Context> c) : context(std::move(c)) {}
  ~VulkanBuffer() override;
  std::shared_ptr<Context> context;
  VkBuffer handle = VK_NULL_HANDLE;
  VkDeviceMemory memory = VK_NULL_HANDLE;
};

enum class Place : uint8_t {
  kDevice,       // the device's own memory
  kHost,         // mapped, and fast for the host to read
  kMappedDevice  // mapped, the device's own where the host reaches it: small things, read often
};

// Not zeroed. The handle has a multiple of 16 bytes, so that an operand may end anywhere.
Result<std::unique_ptr<VulkanBuffer>> allocate(const std::shared_ptr<Context>&, Place, uint64_t bytes);

// Mapped memory that host data passes through, two halves in turn. Every call returns when all is done.
class Staging {
 public:
  static constexpr uint64_t kBytes = 2 << 20;  // of a half: 0.1 ms over PCIe, ten times what a submit costs

  explicit Staging(std::shared_ptr<Context> context) : timeline_(std::move(context)) {}
  ~Staging();
  Status open();
  Status write(const View& to, const std::byte* from);
  Status read(std::byte* to, const View& from);
  Status copy(const View& to, const View& from);
  Status clear(VulkanBuffer&);

 private:
  // Submits what `record` puts into a command buffer.
  template <typename Record>
  Status submit(uint32_t half, const Record& record);
  Status finish() { return timeline_.wait(timeline_.last()); }

  Timeline timeline_;
  std::mutex mutex_;
  std::unique_ptr<VulkanBuffer> memory_;
  VkCommandPool pool_ = VK_NULL_HANDLE;
  VkCommandBuffer commands_[2] = {};
  uint64_t submitted_[2] = {};
};

}  // namespace thimble::vulkan
