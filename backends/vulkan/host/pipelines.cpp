#include "backends/vulkan/host/pipelines.h"

#include <exception>
#include <string>

#include "base/cache.h"

namespace thimble::vulkan {

// One file per device and driver.
static std::string cache_name(const Gpu& gpu) {
  std::string name = "vulkan-";
  for (const uint8_t byte : gpu.cache_uuid) {
    constexpr char kDigits[] = "0123456789abcdef";
    name += kDigits[byte >> 4];
    name += kDigits[byte & 15];
  }
  return name;
}

Pipelines::~Pipelines() {
  const Api& vk = context_.vk;
  const VkDevice device = context_.device;
  for (const auto& [key, pipeline] : pipelines_) vk.DestroyPipeline(device, pipeline, nullptr);
  vk.DestroyPipelineCache(device, cache_, nullptr);
  for (const VkPipelineLayout layout : layouts_) vk.DestroyPipelineLayout(device, layout, nullptr);
  for (const VkDescriptorSetLayout layout : set_layouts_)
    vk.DestroyDescriptorSetLayout(device, layout, nullptr);
}

Status Pipelines::open() {
  const Api& vk = context_.vk;
  VkDescriptorSetLayoutBinding bindings[kMostOperands + 1];
  for (uint32_t i = 0; i <= kMostOperands; ++i) {
    bindings[i] = {.binding = i,
                   .descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                   .descriptorCount = 1,
                   .stageFlags = VK_SHADER_STAGE_COMPUTE_BIT};
    const VkDescriptorSetLayoutCreateInfo set{.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO,
                                              .bindingCount = i + 1,
                                              .pBindings = bindings};
    THIMBLE_TRY(context_.check(vk.CreateDescriptorSetLayout(context_.device, &set, nullptr, &set_layouts_[i]),
                               "making a layout"));
    const VkPushConstantRange push{VK_SHADER_STAGE_COMPUTE_BIT, 0, kPushBytes};
    const VkPipelineLayoutCreateInfo layout{.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO,
                                            .setLayoutCount = 1,
                                            .pSetLayouts = &set_layouts_[i],
                                            .pushConstantRangeCount = 1,
                                            .pPushConstantRanges = &push};
    THIMBLE_TRY(context_.check(vk.CreatePipelineLayout(context_.device, &layout, nullptr, &layouts_[i]),
                               "making a layout"));
  }
  const std::vector<std::byte> kept = read_cache(cache_name(context_.gpu));
  kept_bytes_ = kept.size();
  const VkPipelineCacheCreateInfo cache{.sType = VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO,
                                        .initialDataSize = kept.size(),
                                        .pInitialData = kept.data()};
  return context_.check(vk.CreatePipelineCache(context_.device, &cache, nullptr, &cache_),
                        "making a pipeline cache");
}

void Pipelines::keep() {
  const std::lock_guard lock(mutex_);
  size_t bytes = 0;
  if (context_.vk.GetPipelineCacheData(context_.device, cache_, &bytes, nullptr) != VK_SUCCESS) return;
  if (bytes <= kept_bytes_) return;  // nothing new
  try {
    std::vector<std::byte> data(bytes);
    if (context_.vk.GetPipelineCacheData(context_.device, cache_, &bytes, data.data()) != VK_SUCCESS) return;
    data.resize(bytes);
    write_cache(cache_name(context_.gpu), data);
    kept_bytes_ = bytes;
  } catch (const std::exception&) {  // not enough memory to copy them; the next run compiles them again
  }
}

Result<VkPipeline> Pipelines::find(Shader shader, std::span<const uint32_t> constants, size_t operands) {
  const std::lock_guard lock(mutex_);
  Key key(shader, operands, {constants.begin(), constants.end()});
  if (const auto found = pipelines_.find(key); found != pipelines_.end()) return found->second;
  THIMBLE_LET(pipeline, compile(shader, constants, operands));
  pipelines_.emplace(std::move(key), pipeline);
  return pipeline;
}

Result<VkPipeline> Pipelines::compile(Shader shader, std::span<const uint32_t> constants, size_t operands) {
  const Api& vk = context_.vk;
  const std::span<const uint32_t> code = shader_code(shader);
  const VkShaderModuleCreateInfo create{.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO,
                                        .codeSize = code.size_bytes(),
                                        .pCode = code.data()};
  VkShaderModule module = VK_NULL_HANDLE;
  THIMBLE_TRY(
      context_.check(vk.CreateShaderModule(context_.device, &create, nullptr, &module), "loading a shader"));

  std::vector<VkSpecializationMapEntry> entries;
  for (uint32_t i = 0; i < constants.size(); ++i) entries.push_back({i, i * 4, sizeof(uint32_t)});
  const VkSpecializationInfo specialization{static_cast<uint32_t>(entries.size()), entries.data(),
                                            constants.size_bytes(), constants.data()};
  const VkPipelineShaderStageRequiredSubgroupSizeCreateInfoEXT size{
      .sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO_EXT,
      .requiredSubgroupSize = context_.gpu.limits.subgroup_size};
  const VkComputePipelineCreateInfo info{
      .sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
      .stage = {.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO,
                .pNext = context_.gpu.sets_subgroup_size ? &size : nullptr,
                .stage = VK_SHADER_STAGE_COMPUTE_BIT,
                .module = module,
                .pName = "main",
                .pSpecializationInfo = &specialization},
      .layout = layouts_[operands]};
  VkPipeline pipeline = VK_NULL_HANDLE;
  const VkResult made = vk.CreateComputePipelines(context_.device, cache_, 1, &info, nullptr, &pipeline);
  vk.DestroyShaderModule(context_.device, module, nullptr);
  THIMBLE_TRY(context_.check(made, (std::string("compiling the shader ") + shader_name(shader)).c_str()));
  return pipeline;
}

}  // namespace thimble::vulkan
