// Device memory, host-visible memory, and copies between host and device.
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
  kDevice,  // the device's own memory
  kHost,    // mapped, and fast to read on the host
  // Mapped, in the device's own memory if the host can access it; for small data that is read often.
  kMappedDevice
};

// The memory is not zeroed. The size of the VkBuffer is rounded up to a multiple of 16 bytes, so that an
// operand may end anywhere.
Result<std::unique_ptr<VulkanBuffer>> allocate(const std::shared_ptr<Context>&, Place, uint64_t bytes);

// Mapped memory for copies of host data. Its two halves are used in turn. Every call returns after its work
// is done.
class Staging {
 public:
  // The size of a half: 0.1 ms over PCIe, ten times the cost of a submit.
  static constexpr uint64_t kBytes = 2 << 20;

  explicit Staging(std::shared_ptr<Context> context) : timeline_(std::move(context)) {}
  ~Staging();
  Status open();
  Status write(const View& to, const std::byte* from);
  Status read(std::byte* to, const View& from);
  Status copy(const View& to, const View& from);
  Status clear(VulkanBuffer&);

 private:
  // Submits the commands that `record` adds to a command buffer.
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
