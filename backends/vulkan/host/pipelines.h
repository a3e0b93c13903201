// Compiled shaders. They are created when a program first uses them, shared by all programs of a device, and
// cached on disk between runs.
#pragma once

#include <map>
#include <mutex>
#include <span>
#include <tuple>
#include <vector>

#include "backends/vulkan/host/context.h"
#include "backends/vulkan/recording.h"

namespace thimble::vulkan {

inline constexpr uint32_t kPushBytes = 128;  // the limit that every device supports

class Pipelines {
 public:
  explicit Pipelines(const Context& context) : context_(context) {}
  ~Pipelines();
  Status open();

  // The pipeline of a shader with these specialisation constants and so many operands.
  Result<VkPipeline> find(Shader, std::span<const uint32_t> constants, size_t operands);
  // Writes to disk what was compiled since the last call, because an app may be killed. NVIDIA's compiler
  // takes 8 s for the pipelines of a model.
  void keep();
  // The layout of shaders with so many operands.
  VkDescriptorSetLayout set_layout(size_t operands) const { return set_layouts_[operands]; }
  VkPipelineLayout layout(size_t operands) const { return layouts_[operands]; }

 private:
  using Key = std::tuple<Shader, size_t, std::vector<uint32_t>>;

  Result<VkPipeline> compile(Shader, std::span<const uint32_t> constants, size_t operands);

  const Context& context_;
  VkDescriptorSetLayout set_layouts_[kMostOperands + 1] = {};
  VkPipelineLayout layouts_[kMostOperands + 1] = {};
  std::mutex mutex_;
  std::map<Key, VkPipeline> pipelines_;
  VkPipelineCache cache_ = VK_NULL_HANDLE;
  size_t kept_bytes_ = 0;  // size of the cache when it was last read or written
};

}  // namespace thimble::vulkan
