// An opened device: the objects that its buffers, streams and programs share.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "backends/vulkan/host/gpu.h"
#include "backends/vulkan/host/instance.h"
#include "base/status.h"

namespace thimble::vulkan {

class Pipelines;

// Receives the messages of validation layers, on any thread.
using Messages = std::function<void(const char*)>;

// The meaning of a VkResult as readable text.
std::string result_text(VkResult);

class Context {
 public:
  static Result<std::shared_ptr<Context>> open(const Instance&, const Gpu&, Messages = {});
  Context(const Instance&, const Gpu&, Messages);
  ~Context();

  // The Status of a call; `doing` completes "the device failed while ...".
  Status check(VkResult, const char* doing) const;

  const Instance& instance;
  const Gpu gpu;
  Api vk;
  VkDevice device = VK_NULL_HANDLE;
  VkQueue queue = VK_NULL_HANDLE;
  mutable std::mutex queue_mutex;  // held while something is submitted
  std::unique_ptr<Pipelines> pipelines;

 private:
  Status open();

  const Messages messages_;
  VkDebugUtilsMessengerEXT messenger_ = VK_NULL_HANDLE;
};

// A barrier between all earlier and all later work, including work of the host. Earlier work is finished and
// visible before later work starts. Every command buffer begins and ends with one.
void full_barrier(const Api&, VkCommandBuffer);

// Counts submits that run in order: those of a stream, or of the staging memory.
class Timeline {
 public:
  explicit Timeline(std::shared_ptr<Context> context) : context_(std::move(context)) {}
  ~Timeline();
  Status open();
  // Submits command buffers, and increments the count.
  Status submit(std::span<const VkCommandBuffer>);
  // The number of the last submit.
  uint64_t last() const { return last_; }
  // Waits until that submit is done.
  Status wait(uint64_t submit);
  const std::shared_ptr<Context>& context() const { return context_; }

 private:
  const std::shared_ptr<Context> context_;
  VkSemaphore semaphore_ = VK_NULL_HANDLE;
  uint64_t last_ = 0, done_ = 0;
};

}  // namespace thimble::vulkan
